//! Development tasks: `cargo xtask test` is what CI runs and what the README tells people to run.

#![forbid(unsafe_code)]

mod tidy;

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const USAGE: &str = "cargo xtask test    everything CI checks: tidy, format, clippy, all tests
cargo xtask tidy    arrows between crates, file lengths, names
cargo xtask lint    format and clippy";

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
    test_over_mpi()
}

/// What links MPI, where MPI is: its library for programs to link, and its launcher.
fn test_over_mpi() -> Result<()> {
    for tool in ["mpicc", "mpirun"] {
        if Command::new(tool).arg("--version").output().is_err() {
            println!("xtask: there is no {tool} here: ranks over MPI were neither built nor tested");
            return Ok(());
        }
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
    println!("$ cargo {}", args.join(" "));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo).args(args).current_dir(root()).status().context("starting cargo")?;
    if !status.success() {
        bail!("cargo {} failed ({status})", args.join(" "));
    }
    Ok(())
}
