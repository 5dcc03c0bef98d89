//! Fetches a repository from the Hugging Face hub, or from any server that speaks its API
//! (`HF_ENDPOINT`). The client keeps partial files and resumes them.

use super::cache::Cache;
use super::pull::byte_bar;
use super::wheel::hex;
use crate::environment;
use anyhow::{Context, Result, bail};
use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Repo, RepoType};
use indicatif::ProgressBar;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Files besides weights that a checkpoint may have.
const COMPANIONS: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];

/// Fetches `repo` at `revision` and returns the folder (safetensors) or file (a single GGUF).
///
/// # Errors
/// One sentence: no network, no such repository, nothing loadable in it, a wrong checksum.
pub fn pull(cache: &Cache, repo: &str, revision: &str, target: &Path) -> Result<PathBuf> {
    let api = client(cache)?;
    let handle = api.repo(Repo::with_revision(repo.to_owned(), RepoType::Model, revision.to_owned()));
    let listing = handle.info().map_err(|e| explain(&e, repo))?;
    let names: Vec<&str> = listing.siblings.iter().map(|s| s.rfilename.as_str()).collect();
    let wanted = choose_files(&names).with_context(|| format!("{repo}@{revision}"))?;

    let staging = cache.staging()?;
    for name in &wanted {
        let metadata = api.metadata(&handle.url(name)).map_err(|e| explain(&e, repo))?;
        let bar = HubBar(byte_bar(metadata.size() as u64, name));
        let blob = handle.download_with_progress(name, bar).map_err(|e| explain(&e, repo))?;
        check_sum(&blob, metadata.etag(), name)?;
        let destination = staging.path().join(name);
        fs::copy(&blob, &destination).with_context(|| format!("writing {}", destination.display()))?;
    }
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
    }
    if let [only] = wanted.as_slice()
        && only.ends_with(".gguf")
    {
        fs::create_dir_all(target).with_context(|| format!("making {}", target.display()))?;
        let file = target.join(only);
        fs::rename(staging.path().join(only), &file).with_context(|| format!("moving the model to {}", file.display()))?;
        return Ok(file);
    }
    fs::rename(staging.path(), target).with_context(|| format!("moving the model to {}", target.display()))?;
    Ok(target.to_owned())
}

fn client(cache: &Cache) -> Result<Api> {
    let mut builder = ApiBuilder::new()
        .with_progress(false)
        .with_retries(2)
        .with_token(environment::hub_token())
        .with_cache_dir(cache.root().join("hub"));
    if let Some(endpoint) = environment::hub_endpoint() {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            bail!("HF_ENDPOINT = {endpoint}: expected an http:// or https:// address");
        }
        builder = builder.with_endpoint(endpoint);
    }
    builder.build().map_err(|e| anyhow::anyhow!("the Hugging Face client cannot start: {e}"))
}

/// Which files of a repository make a loadable model: config, tokenizer and safetensors, or else the
/// only GGUF.
fn choose_files(names: &[&str]) -> Result<Vec<String>> {
    // A name from outside never leaves the folder it is put in.
    let flat = |name: &&&str| !name.contains(['/', '\\']) && !name.starts_with('.');
    let weights: Vec<&str> = names.iter().filter(flat).copied().filter(|n| n.ends_with(".safetensors")).collect();
    if !weights.is_empty() && names.contains(&"config.json") {
        // Shards and a consolidated copy may lie side by side: with an index, only shards count.
        let sharded = names.contains(&"model.safetensors.index.json");
        let weights = weights.into_iter().filter(|n| if sharded { n.contains("-of-") } else { *n == "model.safetensors" });
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
        // A damaged partial file would be resumed for ever.
        let _ = fs::remove_file(fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()));
        bail!("{name}: SHA-256 is {sum}, expected {etag}; the damaged file was removed, pull again");
    }
    Ok(())
}

fn explain(error: &ApiError, repo: &str) -> anyhow::Error {
    let text = error.to_string();
    if text.contains("404") {
        anyhow::anyhow!("{repo}: no such repository, revision or file on the hub")
    } else if text.contains("401") || text.contains("403") {
        anyhow::anyhow!("{repo}: the hub refuses access; a gated or private repository needs HF_TOKEN")
    } else if text.to_lowercase().contains("no space left") {
        anyhow::anyhow!("no space left on the disk of the model cache")
    } else {
        anyhow::anyhow!("{repo}: the hub cannot be reached or answered wrongly: no network? ({text})")
    }
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
        let names = ["README.md", "config.json", "tokenizer.json", "model.safetensors", "onnx/model.onnx", "pytorch_model.bin"];
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
    fn one_gguf_is_taken_and_several_are_listed() {
        assert_eq!(choose_files(&["a.gguf", "README.md"]).unwrap(), ["a.gguf"]);
        let message = choose_files(&["a.Q4_0.gguf", "a.Q8_0.gguf"]).unwrap_err().to_string();
        assert!(message.contains("a.Q4_0.gguf, a.Q8_0.gguf"), "{message}");
        assert!(choose_files(&["README.md"]).is_err());
        assert!(choose_files(&["../../evil.gguf"]).is_err());
    }
}
