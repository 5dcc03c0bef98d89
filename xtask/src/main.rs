//! Development tasks: `cargo xtask test` is what CI runs and what the README tells people to run.

#![forbid(unsafe_code)]

mod cuda;
mod emulated;
mod tidy;

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const USAGE: &str = "cargo xtask test        everything CI checks: tidy, format, clippy, all tests
cargo xtask tidy        arrows between crates, file lengths, names
cargo xtask lint        format and clippy
cargo xtask emulated    the backend's tests for aarch64, under an emulator
cargo xtask cuda        the feature cuda: all kernels compile, what needs no GPU is tested
cargo xtask cuda-toolkit    fetches nvcc (105 MB) for builds with that feature";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["test"] => test(),
        ["tidy"] => tidy::run(&root()),
        ["lint"] => lint(),
        ["emulated"] => emulated::run(),
        ["cuda"] => check_cuda(),
        ["cuda-toolkit"] => cuda::toolkit(&root()),
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            Ok(())
        }
        [] => bail!("which task?\n{USAGE}"),
        other => bail!("no task {}\n{USAGE}", other.join(" ")),
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_owned)
}

fn test() -> Result<()> {
    tidy::run(&root())?;
    lint()?;
    cargo(&["test", "--workspace", "--all-targets"])?;
    cargo(&["test", "--workspace", "--doc"])?;
    test_over_mpi()?;
    emulated::run()
}

fn check_cuda() -> Result<()> {
    cuda::toolkit(&root())?;
    cuda::CHECKS.iter().try_for_each(|args| cargo(args))?;
    if missing_mpi().is_none() {
        cargo(&["clippy", "-p", "pagemill", "--features", "cuda,mpi", "--all-targets", "--", "-D", "warnings"])?;
    }
    Ok(())
}

/// What of MPI is not here: its library for programs to link, or its launcher.
fn missing_mpi() -> Option<&'static str> {
    ["mpicc", "mpirun"].into_iter().find(|tool| Command::new(tool).arg("--version").output().is_err())
}

/// What links MPI, where MPI is.
fn test_over_mpi() -> Result<()> {
    if let Some(tool) = missing_mpi() {
        println!("xtask: there is no {tool} here: ranks over MPI were neither built nor tested");
        return Ok(());
    }
    cargo(&["clippy", "-p", "pagemill-mpi", "--features", "link", "--all-targets", "--", "-D", "warnings"])?;
    cargo(&["clippy", "-p", "pagemill", "--features", "mpi", "--", "-D", "warnings"])?;
    cargo(&["test", "-p", "pagemill-mpi", "--features", "link"])
}

fn lint() -> Result<()> {
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])
}

fn cargo(args: &[&str]) -> Result<()> {
    cargo_with(args, &[])
}

/// Runs cargo in the workspace with these variables set.
fn cargo_with(args: &[&str], envs: &[(&str, &str)]) -> Result<()> {
    println!("$ cargo {}", args.join(" "));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).envs(envs.iter().copied()).current_dir(root());
    let status = command.status().context("starting cargo")?;
    if !status.success() {
        bail!("cargo {} failed ({status})", args.join(" "));
    }
    Ok(())
}
