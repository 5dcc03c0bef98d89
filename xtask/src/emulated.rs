//! The kernels of a processor that this machine is not: compiled for it and tested under an emulator. Decides what
//! is needed for that and what to say when it is not there; `.ci/run` installs it.

use crate::cargo_with;
use anyhow::Result;
use std::path::Path;
use std::process::Command;

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
/// Where the cross compiler's packages put the target's libraries.
const SYSROOT: &str = "/usr/aarch64-linux-gnu";

/// Lints the backend for aarch64 and runs the backend's tests under the emulator, on small shapes
/// (`crates/backend/tests/support/emulation.rs`). Where tools are missing nothing is run, and what and why is said
/// on stderr: the machine may not allow for them.
///
/// # Errors
/// When a lint or test fails.
pub fn run() -> Result<()> {
    if cfg!(target_arch = "aarch64") {
        println!("aarch64: this machine is one; the tests above ran its kernels");
        return Ok(());
    }
    let missing = missing();
    if !missing.is_empty() {
        eprintln!("xtask: NOT RUN: the aarch64 (NEON) kernels were neither compiled nor tested. Missing:");
        missing.iter().for_each(|tool| eprintln!("xtask:   {tool}"));
        return Ok(());
    }
    let runner = format!("{EMULATOR} -L {SYSROOT}");
    let envs = [
        ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER),
        ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner.as_str()),
        ("CC_aarch64_unknown_linux_gnu", LINKER),
        ("PAGEMILL_TEST_EMULATED", "1"),
    ];
    cargo_with(&["clippy", "-p", "pagemill-backend", "--target", TARGET, "--", "-D", "warnings"], &envs)?;
    cargo_with(&["test", "-p", "pagemill-backend", "--tests", "--target", TARGET], &envs)
}

/// What cannot be found, each with a way to get it.
fn missing() -> Vec<String> {
    let mut missing = Vec::new();
    if !has_std() {
        missing.push(format!("Rust's standard library for {TARGET} (rustup target add {TARGET})"));
    }
    for (command, package) in [(LINKER, "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"), (EMULATOR, "qemu-user")] {
        if Command::new(command).arg("--version").output().is_err() {
            missing.push(format!("{command} (Debian, Ubuntu: apt-get install {package})"));
        }
    }
    if !Path::new(SYSROOT).join("lib/ld-linux-aarch64.so.1").exists() {
        missing.push(format!("a C library in {SYSROOT} (Debian, Ubuntu: apt-get install libc6-arm64-cross)"));
    }
    missing
}

fn has_std() -> bool {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let printed = Command::new(rustc).args(["--print", "target-libdir", "--target", TARGET]).output();
    let Ok(printed) = printed else { return false };
    Path::new(String::from_utf8_lossy(&printed.stdout).trim()).is_dir()
}
