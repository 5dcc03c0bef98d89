//! The table of architectures: which name is computed by which file. The only place that maps one to
//! the other.

mod gemma3;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;

use crate::config::{Dialect, RawConfig};
use crate::decoder::{self, Architecture};
use crate::{CausalLm, LoadProgress, ModelError, ModelSpec, ParallelMode, RankContext, Stage};
use pagemill_backend::DType;
use pagemill_formats::Weights;

type ReadSpec = fn(&RawConfig, &Weights) -> Result<ModelSpec, ModelError>;
type PlanStages = fn(&RawConfig, &Weights, ParallelMode, &dyn Fn(DType) -> u64) -> Result<Vec<Stage>, ModelError>;
type Load =
    fn(&RawConfig, &Weights, &RankContext, &Stage, &dyn Fn(LoadProgress)) -> Result<Box<dyn CausalLm>, ModelError>;

/// What an architecture's name leads to.
pub(crate) struct Entry {
    dialect: Dialect,
    name: &'static str,
    /// Shapes and limits.
    pub read_spec: ReadSpec,
    /// Which layers each stage holds.
    pub plan_stages: PlanStages,
    /// The loaded decoder.
    pub load: Load,
}

const fn entry<A: Architecture>(dialect: Dialect, name: &'static str) -> Entry {
    Entry {
        dialect,
        name,
        read_spec: decoder::read_spec::<A>,
        plan_stages: decoder::plan_stages::<A>,
        load: decoder::load::<A>,
    }
}

const TABLE: &[Entry] = &[
    entry::<llama::Llama>(Dialect::HuggingFace, "LlamaForCausalLM"),
    entry::<mistral::Mistral>(Dialect::HuggingFace, "MistralForCausalLM"),
    entry::<qwen2::Qwen2>(Dialect::HuggingFace, "Qwen2ForCausalLM"),
    entry::<qwen3::Qwen3>(Dialect::HuggingFace, "Qwen3ForCausalLM"),
    entry::<gemma3::Gemma3>(Dialect::HuggingFace, "Gemma3ForCausalLM"),
    entry::<gemma3::Gemma3>(Dialect::HuggingFace, "Gemma3ForConditionalGeneration"),
    entry::<llama::Llama>(Dialect::Gguf, "llama"),
    entry::<qwen2::Qwen2>(Dialect::Gguf, "qwen2"),
    entry::<qwen3::Qwen3>(Dialect::Gguf, "qwen3"),
    entry::<gemma3::Gemma3>(Dialect::Gguf, "gemma3"),
];

/// The entry of an architecture.
///
/// # Errors
/// The name is not in the table.
pub(crate) fn find(dialect: Dialect, name: &str) -> Result<&'static Entry, ModelError> {
    TABLE.iter().find(|entry| entry.dialect == dialect && entry.name == name).ok_or_else(|| {
        let supported: Vec<_> = TABLE.iter().filter(|entry| entry.dialect == dialect).map(|entry| entry.name).collect();
        ModelError::UnknownArchitecture { architecture: name.into(), supported: supported.join(", ") }
    })
}
