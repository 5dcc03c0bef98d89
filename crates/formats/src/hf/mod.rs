//! The members of a Hugging Face model folder. Decides which files make a model and what is said when one is missing.
//! Does not know any architecture, tokenizer algorithm or sampling rule.

mod config;
mod folder;
mod generation;
mod rope;
mod tokenizer;

pub use config::HfConfig;
pub use folder::HfFolder;
pub(crate) use folder::file_names;
pub use generation::GenerationConfig;
pub use rope::{RopeParameters, RopeSettings};
pub use tokenizer::{HfTokenizer, TokenizerConfig};
