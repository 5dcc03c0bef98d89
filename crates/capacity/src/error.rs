//! What a capacity question can be refused for. Every message is one sentence that says what would do.

use crate::memory::Bytes;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the fields are what the variant names
pub enum CapacityError {
    /// A name that is in none of the tables.
    #[error("{key} = {value}: not known; known are {known}")]
    Unknown { key: &'static str, value: String, known: String },
    /// A count outside its range.
    #[error("{key} = {value}: must be in {least}..={most} ({why})")]
    Range { key: &'static str, value: usize, least: usize, most: usize, why: String },
    /// A size of the model that makes no sense.
    #[error("{model}: {field} = {value} is no size of a decoder; it must be in 1..={most}")]
    Shape { model: String, field: &'static str, value: usize, most: usize },
    /// Each KV head must be read by equally many query heads.
    #[error("{model}: num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}")]
    HeadGroups { model: String, heads: usize, kv_heads: usize },
    /// Heads can be cut over so many ranks only that each has whole KV heads, or all share them evenly.
    #[error(
        "tensor_parallel = {tp}: {heads} query heads and {kv_heads} KV heads do not divide over {tp} ranks; of this model's heads, {allowed} are possible"
    )]
    Heads { tp: usize, heads: usize, kv_heads: usize, allowed: String },
    /// Weights, workspace and reserve leave less than one sequence needs.
    #[error(
        "does not fit: a rank of stage {stage} needs {} ({} of weights, {} of workspace, {} in reserve, {} for one sequence of {tokens} tokens) and has {}, so {} are missing; {}",
        Bytes(*needed_bytes), Bytes(*weight_bytes), Bytes(*workspace_bytes), Bytes(*reserve_bytes), Bytes(*kv_bytes),
        Bytes(*available_bytes), Bytes(needed_bytes.saturating_sub(*available_bytes)), advice(*smallest)
    )]
    DoesNotFit {
        stage: usize,
        needed_bytes: u64,
        weight_bytes: u64,
        workspace_bytes: u64,
        reserve_bytes: u64,
        kv_bytes: u64,
        available_bytes: u64,
        tokens: usize,
        /// Fewest ranks `(tp, pp)` of the same device on which it fits.
        smallest: Option<(usize, usize)>,
    },
}

fn advice(smallest: Option<(usize, usize)>) -> String {
    match smallest {
        Some((tp, pp)) => format!("the fewest ranks that hold it are {} (--tp {tp} --pp {pp})", tp * pp),
        None => "no number of such ranks holds it".to_owned(),
    }
}
