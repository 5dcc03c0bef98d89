//! Fetches a repository from the Hugging Face hub, or from any server that speaks its API
//! (`HF_ENDPOINT`). The client keeps partial files and resumes them.

use super::cache::Cache;
use super::pull::byte_bar;
use super::wheel::hex;
use crate::environment;
use anyhow::{Context, Result, anyhow, bail};
use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo, Metadata};
use hf_hub::{Cache as HubCache, CacheRepo, Repo, RepoType};
use indicatif::ProgressBar;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Files besides weights that a checkpoint may have.
const COMPANIONS: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];

/// How often a broken download is taken up again before the person is told.
const ATTEMPTS: u32 = 3;

/// Fetches `repo` at `revision` and returns the folder (safetensors) or file (a single GGUF). What was
/// fetched completely or in part before a failure is kept and not fetched again.
///
/// # Errors
/// One sentence: no network, no such repository, nothing loadable in it, a wrong checksum.
pub fn pull(cache: &Cache, repo: &str, revision: &str, target: &Path) -> Result<PathBuf> {
    let hub = Hub::new(cache, repo, revision)?;
    let listing = hub.ask(|| hub.files.info())?;
    let names: Vec<&str> = listing.siblings.iter().map(|s| s.rfilename.as_str()).collect();
    let wanted = choose_files(&names).with_context(|| format!("{repo}@{revision}"))?;
    let blobs: Vec<PathBuf> = wanted.iter().map(|name| hub.fetch(name)).collect::<Result<_>>()?;

    let staging = cache.staging()?;
    let model = staging.path().join("model");
    fs::create_dir(&model).with_context(|| format!("making {}", model.display()))?;
    for (name, blob) in wanted.iter().zip(&blobs) {
        let destination = model.join(name);
        // A second name for the same bytes where the file system can, and so no second gigabytes.
        if fs::hard_link(blob, &destination).is_err() {
            fs::copy(blob, &destination).with_context(|| format!("writing {}", destination.display()))?;
        }
    }
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
    }
    fs::rename(&model, target).with_context(|| format!("moving the model to {}", target.display()))?;
    // Best effort: what stays only costs disk.
    let _ = fs::remove_dir_all(hub.downloads());
    match wanted.as_slice() {
        [only] if only.ends_with(".gguf") => Ok(target.join(only)),
        _ => Ok(target.to_owned()),
    }
}

/// One repository on the hub.
struct Hub {
    api: Api,
    files: ApiRepo,
    repo: Repo,
    name: String,
    downloads_root: PathBuf,
}

impl Hub {
    fn new(cache: &Cache, name: &str, revision: &str) -> Result<Self> {
        let downloads_root = cache.root().join("hub");
        // The client's own retries append at a wrong offset after a resume; `fetch` tries again itself.
        let mut builder = ApiBuilder::from_cache(HubCache::new(downloads_root.clone()))
            .with_progress(false)
            .with_retries(0)
            .with_token(environment::hub_token());
        if let Some(endpoint) = environment::hub_endpoint() {
            let endpoint = endpoint.trim_end_matches('/').to_owned();
            if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
                bail!("HF_ENDPOINT = {endpoint}: expected an http:// or https:// address");
            }
            builder = builder.with_endpoint(endpoint);
        }
        let api = builder.build().map_err(|e| anyhow!("the Hugging Face client cannot start: {e}"))?;
        let repo = Repo::with_revision(name.to_owned(), RepoType::Model, revision.to_owned());
        Ok(Self { files: api.repo(repo.clone()), api, repo, name: name.to_owned(), downloads_root })
    }

    /// Where the client keeps what it fetches of this repository.
    fn downloads(&self) -> PathBuf {
        self.downloads_root.join(self.repo.folder_name())
    }

    /// The client's names for files in it.
    fn cached(&self) -> CacheRepo {
        HubCache::new(self.downloads_root.clone()).repo(self.repo.clone())
    }

    /// Runs one call of the client; its errors, and its panics over odd answers, become sentences.
    fn ask<T>(&self, call: impl FnOnce() -> Result<T, ApiError>) -> Result<T> {
        self.attempt(call)?.map_err(|e| self.explain(&e))
    }

    fn attempt<T>(&self, call: impl FnOnce() -> Result<T, ApiError>) -> Result<Result<T, ApiError>> {
        let hook = panic::take_hook();
        panic::set_hook(Box::new(|fault| tracing::debug!("the Hugging Face client: {fault}")));
        let outcome = panic::catch_unwind(AssertUnwindSafe(call));
        panic::set_hook(hook);
        outcome.map_err(|_| anyhow!("{}: the hub answers in a way that its client does not understand", self.name))
    }

    /// Fetches one file, whole and checked, and returns where it lies.
    fn fetch(&self, name: &str) -> Result<PathBuf> {
        let metadata = self.ask(|| self.api.metadata(&self.files.url(name)))?;
        // Both become parts of paths.
        for (what, text) in [("etag", metadata.etag()), ("x-repo-commit", metadata.commit_hash())] {
            if !is_plain_tag(text) {
                bail!("{}: the hub's {what} for {name} is not one: {text:?}", self.name);
            }
        }
        let blob = self.cached().blob_path(metadata.etag());
        if file_bytes(&blob) != Some(metadata.size() as u64) {
            self.download(name, &metadata, &blob)?;
        }
        check_sum(&blob, metadata.etag(), name)?;
        Ok(blob)
    }

    fn download(&self, name: &str, metadata: &Metadata, blob: &Path) -> Result<()> {
        let expected = metadata.size() as u64;
        let partial = blob.with_extension("part");
        let pointer = self.cached().pointer_path(metadata.commit_hash()).join(name);
        let bar = byte_bar(expected, name);
        let mut fault = None;
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                std::thread::sleep(Duration::from_millis(300 << attempt));
            }
            // The client would ask for the bytes after the last one, for ever.
            if file_bytes(&partial).is_some_and(|n| n >= expected) {
                fs::remove_file(&partial).with_context(|| format!("removing {}", partial.display()))?;
            }
            // A link to a blob that was refused and removed stops the client; without one it makes its own.
            if pointer.is_symlink() {
                fs::remove_file(&pointer).with_context(|| format!("removing {}", pointer.display()))?;
            }
            match self.attempt(|| self.files.download_with_progress(name, HubBar(bar.clone())))? {
                Ok(_) if file_bytes(blob) == Some(expected) => return Ok(()),
                Ok(_) => {
                    // Too short or too long: a server that ignores ranges, or a silent cut.
                    fs::remove_file(blob).with_context(|| format!("removing {}", blob.display()))?;
                    fault = Some(anyhow!("{name}: the hub did not send the {expected} bytes that it had announced"));
                }
                Err(e) if is_passing(&e) => fault = Some(self.explain(&e)),
                Err(e) => return Err(self.explain(&e)),
            }
        }
        bar.finish_and_clear();
        let kept = file_bytes(&partial).map_or_else(String::new, |n| {
            format!("; {n} of {expected} bytes are kept, and pulling again goes on from there")
        });
        Err(fault.unwrap_or_else(|| anyhow!("{name}: nothing was fetched")).context(format!("{name}{kept}")))
    }

    fn explain(&self, error: &ApiError) -> anyhow::Error {
        let name = &self.name;
        if is_storage_full(error) {
            return anyhow!("no space left on the disk of the model cache");
        }
        match (error, status_of(error)) {
            (_, Some(404)) => anyhow!("{name}: no such repository, revision or file on the hub"),
            (_, Some(401 | 403)) => anyhow!(
                "{name}: the hub refuses access: there is no such repository, or it is private or gated and HF_TOKEN \
                 must hold a token that may read it"
            ),
            (_, Some(429)) => anyhow!("{name}: the hub asks to wait before the next request (HTTP status 429)"),
            (_, Some(status)) => anyhow!("{name}: the hub answered with HTTP status {status}; try again later"),
            (ApiError::LockAcquisition(_), _) => anyhow!("{name}: another process is fetching it right now"),
            (ApiError::MissingHeader(header) | ApiError::InvalidHeader(header), _) => {
                anyhow!("{name}: the server's answer has no usable header {header}: is HF_ENDPOINT a Hugging Face hub?")
            }
            (ApiError::RequestError(e), _) if e.to_string().starts_with("json: ") => {
                anyhow!(
                    "{name}: the server's answer is no listing of a repository: is HF_ENDPOINT a Hugging Face hub? ({e})"
                )
            }
            _ => anyhow!("{name}: the hub cannot be reached: no network? ({error})"),
        }
    }
}

/// The HTTP status in an error. The client keeps it only as text.
fn status_of(error: &ApiError) -> Option<u16> {
    let ApiError::RequestError(inner) = error else {
        return None;
    };
    inner.to_string().strip_prefix("http status: ")?.parse().ok()
}

fn is_storage_full(error: &ApiError) -> bool {
    matches!(error, ApiError::IoError(e) if matches!(e.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded))
}

/// Whether asking again may help: a broken connection, or a server in trouble.
fn is_passing(error: &ApiError) -> bool {
    match error {
        ApiError::RequestError(_) => status_of(error).is_none_or(|status| status >= 500),
        ApiError::IoError(_) => !is_storage_full(error),
        _ => false,
    }
}

/// Whether a text of the server's can be part of a path and stays where it is put.
fn is_plain_tag(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 256
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
        && text.split('/').all(|part| !part.is_empty() && !part.starts_with('.'))
}

fn file_bytes(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|m| m.len())
}

/// Which files of a repository make a loadable model: config, tokenizer and safetensors, or else the
/// only GGUF.
fn choose_files(names: &[&str]) -> Result<Vec<String>> {
    // A name from outside never leaves the folder it is put in, nor changes the address it is fetched from.
    let flat = |name: &&&str| is_plain_tag(name) && !name.contains('/');
    let weights: Vec<&str> = names.iter().filter(flat).copied().filter(|n| n.ends_with(".safetensors")).collect();
    if !weights.is_empty() && names.contains(&"config.json") {
        // Shards and a consolidated copy may lie side by side: with an index, only shards count.
        let sharded = names.contains(&"model.safetensors.index.json");
        let weights =
            weights.into_iter().filter(|n| if sharded { n.contains("-of-") } else { *n == "model.safetensors" });
        let mut chosen: Vec<String> =
            COMPANIONS.iter().filter(|c| names.contains(c)).map(|c| (*c).to_owned()).collect();
        chosen.extend(weights.map(str::to_owned));
        if chosen.iter().any(|n| n.ends_with(".safetensors")) {
            return Ok(chosen);
        }
    }
    let ggufs: Vec<&str> = names.iter().filter(flat).copied().filter(|n| n.ends_with(".gguf")).collect();
    match ggufs.as_slice() {
        [only] => Ok(vec![(*only).to_owned()]),
        [] => bail!("no config.json with model.safetensors and no GGUF file in this repository"),
        several => bail!(
            "this repository holds several GGUF files ({}); fetch the one you want and give its path",
            several.join(", ")
        ),
    }
}

/// Large files carry their SHA-256 as the entity tag; small ones a git hash, which is not compared.
fn check_sum(path: &Path, etag: &str, name: &str) -> Result<()> {
    if etag.len() != 64 || !etag.chars().all(|c| c.is_ascii_hexdigit()) {
        return Ok(());
    }
    let mut file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer).with_context(|| format!("reading {}", path.display()))?;
        if n == 0 {
            break;
        }
        hash.update(&buffer[..n]);
    }
    let sum = hex(&hash.finalize());
    if !sum.eq_ignore_ascii_case(etag) {
        // Kept, it would be taken for whole the next time.
        fs::remove_file(path).with_context(|| format!("removing the damaged {}", path.display()))?;
        bail!("{name}: SHA-256 is {sum}, expected {etag}; the damaged file was removed, pull again");
    }
    Ok(())
}

struct HubBar(ProgressBar);

impl Progress for HubBar {
    fn init(&mut self, size: usize, _filename: &str) {
        self.0.set_length(size as u64);
        self.0.set_position(0);
    }

    fn update(&mut self, size: usize) {
        self.0.inc(size as u64);
    }

    fn finish(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn safetensors_win_and_stray_files_stay_out() {
        let names =
            ["README.md", "config.json", "tokenizer.json", "model.safetensors", "onnx/model.onnx", "pytorch_model.bin"];
        assert_eq!(choose_files(&names).unwrap(), ["config.json", "tokenizer.json", "model.safetensors"]);
        let names = [
            "config.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "consolidated.safetensors",
        ];
        assert_eq!(
            choose_files(&names).unwrap(),
            [
                "config.json",
                "model.safetensors.index.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors"
            ]
        );
    }

    #[test]
    fn tags_that_would_leave_the_folder_are_refused() {
        assert!(is_plain_tag("0123456789abcdef") && is_plain_tag("W/abc-gzip"));
        for evil in ["", "/etc/passwd", "../x", "a/../b", "a//b", ".ssh", "a b", "a\u{0}"] {
            assert!(!is_plain_tag(evil), "{evil:?}");
        }
    }

    #[test]
    fn one_gguf_is_taken_and_several_are_listed() {
        assert_eq!(choose_files(&["a.gguf", "README.md"]).unwrap(), ["a.gguf"]);
        let message = choose_files(&["a.Q4_0.gguf", "a.Q8_0.gguf"]).unwrap_err().to_string();
        assert!(message.contains("a.Q4_0.gguf, a.Q8_0.gguf"), "{message}");
        assert!(choose_files(&["README.md"]).is_err());
        for evil in ["../../evil.gguf", "..\\evil.gguf", "/evil.gguf", "evil.gguf?x=.gguf", ".gguf"] {
            assert!(choose_files(&[evil]).is_err(), "{evil}");
        }
    }
}
