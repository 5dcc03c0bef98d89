//! Finds the model that a person names: a GGUF file, a Hugging Face folder, a name of the catalogue, or
//! a Hugging Face repository. Knows where downloads are kept; knows no tensor.

pub mod cache;
pub mod catalogue;
#[cfg(feature = "hub")]
pub mod hub;
pub mod pull;
mod wheel;

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// What a person's MODEL argument means.
#[derive(Debug, PartialEq, Eq)]
pub enum ModelRef {
    /// A GGUF file or a folder that exists.
    Local(PathBuf),
    /// A name of the catalogue.
    Named(&'static catalogue::CatalogueEntry),
    /// `owner/name[@revision]` of a Hugging Face repository.
    Hub {
        /// `owner/name`.
        repo: String,
        /// Branch, tag or commit; `main` when not said.
        revision: String,
    },
}

impl ModelRef {
    /// Reads a MODEL argument. A path that exists wins over a name.
    ///
    /// # Errors
    /// A sentence that says what MODEL may be.
    pub fn parse(text: &str) -> Result<Self> {
        let path = Path::new(text);
        if path.exists() {
            return Ok(Self::Local(path.to_owned()));
        }
        if let Some(entry) = catalogue::find(text) {
            return Ok(Self::Named(entry));
        }
        let looks_like_path = text.ends_with(".gguf") || text.starts_with(['/', '.', '~']);
        if !looks_like_path && let Some(hub) = parse_hub_name(text) {
            return Ok(hub);
        }
        if looks_like_path {
            bail!("{text}: no such file or folder");
        }
        bail!(
            "{text}: not a file, not a folder, and not a known name. MODEL is a GGUF file, a Hugging Face folder, \
             a Hugging Face repository (owner/name), or one of: {}",
            catalogue::names()
        )
    }
}

fn parse_hub_name(text: &str) -> Option<ModelRef> {
    let (repo, revision) = text.split_once('@').unwrap_or((text, "main"));
    let (owner, name) = repo.split_once('/')?;
    let valid = |part: &str| {
        !part.is_empty()
            && part.len() <= 96
            && !part.starts_with(['.', '-'])
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let valid_revision = !revision.is_empty()
        && !revision.contains("..")
        && revision.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c));
    (valid(owner) && valid(name) && valid_revision)
        .then(|| ModelRef::Hub { repo: repo.to_owned(), revision: revision.to_owned() })
}

/// The file or folder of MODEL on this machine, fetched first if need be (with a progress bar).
///
/// # Errors
/// One sentence: what could not be found or fetched, and what to do.
pub fn resolve(text: &str) -> Result<PathBuf> {
    match ModelRef::parse(text)? {
        ModelRef::Local(path) => Ok(path),
        other => {
            let cache = cache::Cache::open()?;
            if let Some(path) = cache.find(&other) {
                return Ok(path);
            }
            pull::pull(&cache, &other).with_context(|| format!("fetching {text}"))
        }
    }
}

/// The name under which a model is served when none is given.
#[must_use]
pub fn default_name(text: &str) -> String {
    match ModelRef::parse(text) {
        Ok(ModelRef::Named(entry)) => entry.name.to_owned(),
        Ok(ModelRef::Hub { repo, .. }) => repo,
        _ => {
            let path = Path::new(text);
            let stem = if path.is_dir() { path.file_name() } else { path.file_stem() };
            stem.map_or_else(|| text.to_owned(), |s| s.to_string_lossy().into_owned())
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_paths_and_repositories_are_told_apart() {
        assert!(matches!(ModelRef::parse("smollm2-135m").unwrap(), ModelRef::Named(e) if e.name == "smollm2-135m"));
        assert_eq!(
            ModelRef::parse("owner/some-model").unwrap(),
            ModelRef::Hub { repo: "owner/some-model".into(), revision: "main".into() }
        );
        assert_eq!(
            ModelRef::parse("owner/m@v1.0").unwrap(),
            ModelRef::Hub { repo: "owner/m".into(), revision: "v1.0".into() }
        );
        assert!(matches!(ModelRef::parse(env!("CARGO_MANIFEST_DIR")).unwrap(), ModelRef::Local(_)));
    }

    #[test]
    fn a_wrong_name_gets_one_sentence() {
        let message = ModelRef::parse("no-such").unwrap_err().to_string();
        assert!(message.contains("no-such") && message.contains("smollm2-135m"), "{message}");
        let message = ModelRef::parse("./missing.gguf").unwrap_err().to_string();
        assert!(message.contains("no such file"), "{message}");
        assert!(ModelRef::parse("../etc/x").is_err());
        assert!(ModelRef::parse("owner/..").is_err());
        assert!(ModelRef::parse("owner/m@../../x").is_err());
    }

    #[test]
    fn the_served_name_is_the_file_stem() {
        assert_eq!(default_name("/x/SmolLM2-135M.Q4_1.gguf"), "SmolLM2-135M.Q4_1");
        assert_eq!(default_name("smollm2-135m"), "smollm2-135m");
    }
}
