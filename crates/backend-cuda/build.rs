//! Compiles every kernel under `kernels/` with nvcc, one image for each file and architecture, and writes the
//! table that embeds them. Decides where nvcc is looked for; needs no GPU. Without the feature `cuda` it does
//! nothing.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Compilers at once: each takes a core and up to a gigabyte.
const MAX_COMPILERS: usize = 2;

/// Targets: name, nvcc's `-gencode`, output flag and suffix. The last is for chips newer than this list.
const TARGETS: [Target; 3] = [
    Target { name: "sm_80", gencode: "arch=compute_80,code=sm_80", flag: "-cubin" },
    Target { name: "sm_90a", gencode: "arch=compute_90a,code=sm_90a", flag: "-cubin" },
    Target { name: "compute_90", gencode: "arch=compute_90,code=compute_90", flag: "-ptx" },
];

/// What is built for one kind of chip.
struct Target {
    name: &'static str,
    gencode: &'static str,
    flag: &'static str,
}

/// One run of the compiler.
struct Job {
    source: PathBuf,
    stem: String,
    target: &'static Target,
    image: PathBuf,
}

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=kernels");
    for name in ["NVCC", "CUDA_HOME", "CUDA_PATH", "PATH", "PAGEMILL_CUDA_TARGETS"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            println!("cargo::error={sentence}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: this is cargo's to do")?);
    let nvcc = find_nvcc(&out).ok_or(
        "the feature `cuda` needs nvcc (CUDA 12.8 or newer) and found none: set NVCC or CUDA_HOME, put nvcc on PATH, \
         or run `cargo xtask cuda-toolkit`",
    )?;
    let targets = wanted_targets()?;
    let jobs: Vec<Job> = kernel_sources()?
        .into_iter()
        .flat_map(|source| {
            let stem = source.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
            let out = &out;
            targets.iter().map(move |&target| Job {
                image: out.join(format!("{stem}.{}", target.name)),
                stem: stem.clone(),
                source: source.clone(),
                target,
            })
        })
        .collect();
    compile_all(&nvcc, &jobs)?;
    std::fs::write(out.join("images.rs"), table(&jobs)).map_err(|error| format!("writing images.rs: {error}"))
}

/// In the order NVCC, CUDA_HOME and CUDA_PATH, PATH, the folder that `cargo xtask cuda-toolkit` fills.
fn find_nvcc(out: &Path) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("NVCC").filter(|value| !value.is_empty()) {
        return Some(named.into());
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).filter(|value| !value.is_empty());
    let in_homes = homes.map(|home| Path::new(&home).join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path);
    // OUT_DIR lies some folders below cargo's target folder.
    let in_target = out.ancestors().map(|folder| folder.join("cuda-toolkit/nvidia/cu13/bin"));
    in_homes.chain(on_path).chain(in_target).map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.is_file())
}

/// All targets, or those that `PAGEMILL_CUDA_TARGETS` names (to compile less while developing).
fn wanted_targets() -> Result<Vec<&'static Target>, String> {
    let Ok(names) = std::env::var("PAGEMILL_CUDA_TARGETS") else {
        return Ok(TARGETS.iter().collect());
    };
    names
        .split(',')
        .map(|name| {
            TARGETS.iter().find(|target| target.name == name.trim()).ok_or_else(|| {
                let known: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
                format!("PAGEMILL_CUDA_TARGETS: no target {name}; there are {}", known.join(", "))
            })
        })
        .collect()
}

fn kernel_sources() -> Result<Vec<PathBuf>, String> {
    let entries = std::fs::read_dir("kernels").map_err(|error| format!("reading the folder kernels: {error}"))?;
    let mut sources: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    sources.sort();
    Ok(sources)
}

/// Runs all jobs, a few at once; the first fault is told with the compiler's own words.
fn compile_all(nvcc: &Path, jobs: &[Job]) -> Result<(), String> {
    let next = AtomicUsize::new(0);
    let fault = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..MAX_COMPILERS.min(jobs.len()) {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(sentence) = compile(nvcc, job) {
                        let mut fault = fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                        fault.get_or_insert(sentence);
                        next.store(jobs.len(), Ordering::Relaxed);
                    }
                }
            });
        }
    });
    match fault.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some(sentence) => Err(sentence),
        None => Ok(()),
    }
}

fn compile(nvcc: &Path, job: &Job) -> Result<(), String> {
    let source = job.source.display();
    let output = Command::new(nvcc)
        .args(["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-diag-suppress=177"])
        .arg(format!("-gencode={}", job.target.gencode))
        .arg(job.target.flag)
        .arg(&job.source)
        .arg("-o")
        .arg(&job.image)
        .output()
        .map_err(|error| format!("starting {}: {error}", nvcc.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let said: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).take(12).collect();
    Err(format!("{source} for {} does not compile: {}", job.target.name, said.join(" | ")))
}

/// `IMAGES`: (file, target, bytes). PTX ends with a zero byte, as the driver wants it.
fn table(jobs: &[Job]) -> String {
    let mut text = String::from("pub(crate) const IMAGES: &[Image] = &[\n");
    for job in jobs {
        let (stem, target, image) = (&job.stem, job.target.name, job.image.display().to_string());
        let bytes = format!("Aligned(*include_bytes!({image:?}))");
        text.push_str(&format!(
            "    Image {{ file: {stem:?}, target: {target:?}, bytes: {{ static BYTES: &Aligned<[u8]> = &{bytes}; &BYTES.0 }} }},\n"
        ));
    }
    text.push_str("];\n");
    text
}
