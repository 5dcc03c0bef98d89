//! The CUDA compiler without a toolkit or a GPU, and what CI checks of the feature `cuda` with it. Decides which
//! compiler version CI uses and where it lies; a build takes another one if it finds it first.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Python packages that hold nvcc and its headers, with the driver's version of the chips that are tested on: text
/// form kernels of a newer compiler would be refused by that driver.
const WHEELS: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.3.5.0.6",
];

/// Where the packages go: the build script looks here last.
fn folder(root: &Path) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    target.join("cuda-toolkit")
}

/// Fetches the compiler unless it is there.
pub fn toolkit(root: &Path) -> Result<()> {
    let folder = folder(root);
    let nvcc = folder.join("nvidia/cu13/bin/nvcc");
    if nvcc.is_file() {
        println!("{} is there", nvcc.display());
        return Ok(());
    }
    println!("fetching nvcc into {}", folder.display());
    let status = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"])
        .arg(&folder)
        .args(WHEELS)
        .status()
        .context("starting python3 -m pip, which fetches nvcc")?;
    if !status.success() || !nvcc.is_file() {
        bail!("python3 -m pip could not fetch nvcc ({status})");
    }
    Ok(())
}

/// The commands that check the feature: all kernels compile for every target, and what needs no GPU runs.
pub const CHECKS: [&[&str]; 3] = [
    &["clippy", "-p", "pagemill-backend-cuda", "--features", "cuda", "--all-targets", "--", "-D", "warnings"],
    &["clippy", "-p", "pagemill", "--features", "cuda", "--all-targets", "--", "-D", "warnings"],
    &["test", "-p", "pagemill-backend-cuda", "--features", "cuda"],
];
