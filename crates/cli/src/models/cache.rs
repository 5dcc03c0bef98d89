//! The folder where fetched models are kept. A model appears in it by an atomic rename, so whatever is
//! there is whole.

use super::ModelRef;
use crate::environment;
use anyhow::{Context, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const STAGING_PREFIX: &str = ".staging-";
const LOCK_FILE: &str = "lock";

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

    /// Removes what killed downloads left: staging folders that nobody holds the lock of.
    fn clear_abandoned_staging(&self) {
        let Ok(entries) = fs::read_dir(&self.root) else { return };
        for entry in entries.flatten() {
            let is_staging = entry.file_name().to_str().is_some_and(|n| n.starts_with(STAGING_PREFIX));
            let path = entry.path();
            if is_staging && File::open(path.join(LOCK_FILE)).is_ok_and(|lock| lock.try_lock().is_ok()) {
                // Best effort: what stays only costs disk.
                let _ = fs::remove_dir_all(path);
            }
        }
    }

    /// The folder itself.
    #[cfg(feature = "hub")]
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
        let path = self.root.join(format!("{STAGING_PREFIX}{}-{}", std::process::id(), clock_nanos()));
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        // Locked under a name that the clearing does not look for, then renamed: never seen unlocked.
        let (early, lock_path) = (path.join("lock.early"), path.join(LOCK_FILE));
        let lock = File::create(&early).with_context(|| format!("making {}", early.display()))?;
        lock.lock().with_context(|| format!("locking {}", early.display()))?;
        fs::rename(&early, &lock_path).with_context(|| format!("making {}", lock_path.display()))?;
        Ok(Staging { path, _lock: lock })
    }
}

/// A download in progress.
pub struct Staging {
    path: PathBuf,
    /// Tells other processes that this folder is in use; the system lets go of it when this one dies.
    _lock: File,
}

fn clock_nanos() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos())
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
        // Left-overs only cost disk; the next pull clears them.
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn staging_in_use_stays_and_abandoned_staging_goes() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().to_owned()).unwrap();
        let mine = cache.staging().unwrap();
        let abandoned = folder.path().join(".staging-1-1");
        fs::create_dir(&abandoned).unwrap();
        fs::write(abandoned.join(LOCK_FILE), "").unwrap();
        fs::write(abandoned.join("half.gguf"), "GGUF").unwrap();
        let another = cache.staging().unwrap();
        assert!(mine.path().exists() && another.path().exists() && !abandoned.exists());
        drop(mine);
        drop(another);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn half_a_named_model_is_not_found() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().to_owned()).unwrap();
        let model = ModelRef::parse("smollm2-135m").unwrap();
        fs::write(cache.path_of(&model), "GGUF").unwrap();
        assert_eq!(cache.find(&model), None);
    }
}
