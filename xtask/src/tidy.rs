//! The rules that no compiler checks: arrows between crates, file lengths that only shrink, names, where
//! `unsafe` may be.

use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// `from` may depend on each of `to`; nothing else within the workspace. `cli` is where all rooms are
/// put together (docs/decisions/0001-arrows.md).
const ARROWS: &[(&str, &[&str])] = &[
    (
        "cli",
        &["server", "text", "mpi", "engine", "scheduler", "model", "formats", "backend", "backend-cuda", "capacity"],
    ),
    ("server", &["text", "engine", "formats"]),
    ("text", &[]),
    ("mpi", &["engine", "scheduler", "backend"]),
    ("engine", &["scheduler", "model", "formats", "backend"]),
    ("scheduler", &[]),
    ("model", &["formats", "backend"]),
    ("formats", &[]),
    ("backend", &[]),
    ("backend-cuda", &["backend"]),
    ("capacity", &[]),
    ("testkit", &["engine", "scheduler", "backend"]),
];

/// Crates in which `unsafe` may stand.
const UNSAFE_CRATES: &[&str] = &["backend", "backend-cuda"];

/// Crates in which `unsafe` may stand in one file: the crate denies it, and only that file allows it.
const UNSAFE_FILES: &[(&str, &str)] = &[("mpi", "transfer.rs")];

/// Lines in a file at most; the files in `LONG_FILES` may only shrink.
const MAX_LINES: usize = 600;

/// Files above the limit, with the length they may not exceed.
const LONG_FILES: &[(&str, usize)] = &[];

const BANNED_NAMES: &[&str] = &["utils", "util", "common", "helpers", "helper", "misc", "fast", "new", "v2"];

/// Checks everything; prints every fault before failing.
pub fn run(root: &Path) -> Result<()> {
    let mut faults = Vec::new();
    for (name, allowed) in ARROWS {
        check_arrows(root, name, allowed, &mut faults)?;
        match UNSAFE_FILES.iter().find(|(crate_name, _)| crate_name == name) {
            Some((_, file)) => check_unsafe_file(root, name, file, &mut faults)?,
            None => check_forbids_unsafe(root, name, &mut faults)?,
        }
    }
    for folder in ["crates", "xtask"] {
        for file in rust_files(&root.join(folder))? {
            check_file(root, &file, &mut faults)?;
        }
    }
    if faults.is_empty() {
        println!("tidy: ok");
        return Ok(());
    }
    for fault in &faults {
        eprintln!("tidy: {fault}");
    }
    bail!("tidy: {} faults", faults.len())
}

fn check_arrows(root: &Path, name: &str, allowed: &[&str], faults: &mut Vec<String>) -> Result<()> {
    let path = root.join("crates").join(name).join("Cargo.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let manifest: toml::Table = text.parse().with_context(|| format!("reading {}", path.display()))?;
    let Some(dependencies) = manifest.get("dependencies").and_then(|d| d.as_table()) else { return Ok(()) };
    for dependency in dependencies.keys() {
        if let Some(room) = dependency.strip_prefix("pagemill-")
            && !allowed.contains(&room)
        {
            faults.push(format!("crates/{name} depends on {room}: no such arrow in the design"));
        }
    }
    Ok(())
}

fn check_forbids_unsafe(root: &Path, name: &str, faults: &mut Vec<String>) -> Result<()> {
    if UNSAFE_CRATES.contains(&name) {
        return Ok(());
    }
    let file = if name == "cli" { "main.rs" } else { "lib.rs" };
    let path = root.join("crates").join(name).join("src").join(file);
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    if !text.contains("#![forbid(unsafe_code)]") {
        faults.push(format!("crates/{name}/src/{file}: #![forbid(unsafe_code)] is missing"));
    }
    Ok(())
}

/// The crate denies `unsafe`, and no file but `allowed` takes that back.
fn check_unsafe_file(root: &Path, name: &str, allowed: &str, faults: &mut Vec<String>) -> Result<()> {
    for path in rust_files(&root.join("crates").join(name).join("src"))? {
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let relative = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        if path.ends_with("src/lib.rs") && !text.contains("#![deny(unsafe_code)]") {
            faults.push(format!("{relative}: #![deny(unsafe_code)] is missing"));
        }
        if text.contains("allow(unsafe_code)") && !path.ends_with(Path::new("src").join(allowed)) {
            faults.push(format!("{relative}: unsafe may stand in crates/{name}/src/{allowed} alone"));
        }
    }
    Ok(())
}

fn check_file(root: &Path, file: &Path, faults: &mut Vec<String>) -> Result<()> {
    let relative = file.strip_prefix(root).unwrap_or(file).display().to_string();
    let text = fs::read_to_string(file).with_context(|| format!("reading {relative}"))?;
    let lines = text.lines().count();
    let limit = LONG_FILES.iter().find(|(f, _)| *f == relative).map_or(MAX_LINES, |(_, n)| *n);
    if lines > limit {
        faults.push(format!("{relative}: {lines} lines; at most {limit}"));
    }
    let stem = file.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    if BANNED_NAMES.contains(&stem.as_str()) {
        faults.push(format!("{relative}: a name that says nothing"));
    }
    let opens_with_doc = text.lines().find(|l| !l.trim().is_empty()).is_some_and(|l| l.starts_with("//!"));
    if !opens_with_doc {
        faults.push(format!("{relative}: does not open by saying what it decides"));
    }
    Ok(())
}

fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).with_context(|| format!("listing {}", next.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}
