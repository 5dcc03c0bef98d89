//! The folder where fetched models are kept. A model appears in it by an atomic rename, so whatever is
//! there is whole.

use super::ModelRef;
use crate::environment;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

const STAGING_PREFIX: &str = ".staging-";

/// The cache folder.
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// The folder `PAGEMILL_CACHE`, else `pagemill` in the user's cache folder. Made when missing.
    ///
    /// # Errors
    /// A sentence naming the folder that could not be made.
    pub fn open() -> Result<Self> {
        Self::at(environment::cache_folder()?)
    }

    /// The folder `root`. Made when missing.
    ///
    /// # Errors
    /// As [`Cache::open`].
    pub fn at(root: PathBuf) -> Result<Self> {
        fs::create_dir_all(&root).with_context(|| format!("making the cache folder {}", root.display()))?;
        Ok(Self { root })
    }

    /// Where a model is, or will be.
    #[must_use]
    pub fn path_of(&self, model: &ModelRef) -> PathBuf {
        match model {
            ModelRef::Local(path) => path.clone(),
            ModelRef::Named(entry) => self.root.join(entry.file_name),
            ModelRef::Hub { repo, revision } => {
                let folder = format!("{}--{}", repo.replace('/', "--"), revision.replace('/', "--"));
                self.root.join("hub-models").join(folder)
            }
        }
    }

    /// Where a model is, if it is there and whole. Sizes are compared; checksums were compared when
    /// it was fetched.
    #[must_use]
    pub fn find(&self, model: &ModelRef) -> Option<PathBuf> {
        let path = self.path_of(model);
        match model {
            ModelRef::Local(_) => path.exists().then_some(path),
            ModelRef::Named(entry) => {
                let meta = fs::metadata(&path).ok()?;
                (meta.is_file() && meta.len() == entry.bytes).then_some(path)
            }
            ModelRef::Hub { .. } if path.join("config.json").is_file() => Some(path),
            ModelRef::Hub { .. } => fs::read_dir(&path)
                .ok()?
                .flatten()
                .map(|e| e.path())
                .find(|p| p.extension().is_some_and(|e| e == "gguf")),
        }
    }

    /// Removes what killed downloads left: staging folders of processes that are gone.
    fn clear_abandoned_staging(&self) {
        let Ok(entries) = fs::read_dir(&self.root) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|n| n.strip_prefix(STAGING_PREFIX)) else { continue };
            let alive = pid != std::process::id().to_string() && Path::new("/proc").join(pid).exists();
            if !alive {
                // Best effort: what stays only costs disk.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// The folder itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A new, empty folder beside the models for a download in progress, on the same file system so
    /// that the final rename is atomic. Removed when dropped.
    ///
    /// # Errors
    /// A sentence naming the folder.
    pub fn staging(&self) -> Result<Staging> {
        self.clear_abandoned_staging();
        let path = self.root.join(format!("{STAGING_PREFIX}{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Staging { path })
    }
}

/// A download in progress.
pub struct Staging {
    path: PathBuf,
}

impl Staging {
    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Left-overs only cost disk; the next pull of this process id clears them.
        let _ = fs::remove_dir_all(&self.path);
    }
}
