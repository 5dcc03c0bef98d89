//! Starts the program with a clean environment and a cache folder of its own, and judges how it ended.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// However slow the machine is, nothing here takes this long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A zoo model's folder.
pub fn zoo(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/zoo").join(name);
    path.canonicalize().unwrap()
}

/// A copy of a zoo model that a test may spoil.
pub fn zoo_copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(zoo(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

/// The program, with no settings from outside and its cache in `cache`.
pub fn pagemill(cache: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagemill"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("PAGEMILL_") || name.starts_with("HF_") || name.to_lowercase().ends_with("_proxy") {
            command.env_remove(name);
        }
    }
    command.env("PAGEMILL_CACHE", cache).env("PAGEMILL_THREADS", "2").stdin(Stdio::null());
    command
}

/// What a program said.
pub struct Said {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        let said = Self {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        assert!(!said.err.contains("panicked"), "{}", said.err);
        said
    }
}

/// Runs to the end.
pub fn run<A: AsRef<OsStr>>(arguments: &[A]) -> Said {
    let cache = tempfile::tempdir().unwrap();
    finish(pagemill(cache.path()).args(arguments))
}

/// Runs to the end with text on standard input.
pub fn run_with_input<A: AsRef<OsStr>>(arguments: &[A], input: &str) -> Said {
    let cache = tempfile::tempdir().unwrap();
    let mut command = pagemill(cache.path());
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap().into()
}

/// Runs a prepared command to the end.
pub fn finish(command: &mut Command) -> Said {
    command.output().unwrap().into()
}

/// Holds a refusal to the rule: one line on standard error that begins with the program's name and says
/// each of `parts`, nothing on standard output, and a code other than 0. Returns the line.
#[track_caller]
pub fn assert_refused(said: &Said, parts: &[&str]) -> String {
    assert_ne!(said.code, Some(0), "{}", said.err);
    assert!(said.code.is_some(), "ended by a signal: {}", said.err);
    assert_eq!(said.out, "");
    let line = said.err.trim_end().to_owned();
    assert!(line.starts_with("pagemill: ") && !line.contains('\n'), "not one sentence: {:?}", said.err);
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
    line
}

/// A child that does not outlive its test.
pub struct Running(pub Child);

impl Running {
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.0.id().to_string()]).status();
        assert!(status.unwrap().success(), "kill -{name}");
    }

    /// Waits for the end and returns the exit code; `None`: by a signal.
    #[track_caller]
    pub fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the program does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Already gone is what is wanted.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
