//! The devices that a model is laid out over, and what was found out about them at start. Ranks are
//! threads of this process that share the machine's cores out, or have a GPU each.

use crate::config::Config;
use crate::devices;
use anyhow::Result;
use pagemill_engine::{PipelineStatus, RankContext};
use std::fmt::Write as _;

/// The ranks of a configuration, stage by stage.
pub struct Ranks {
    /// Each one's device and its peers.
    pub contexts: Vec<RankContext>,
    /// `cpu (avx2, 1 thread) × 4 ranks`.
    pub description: String,
}

/// Opens a device for each rank.
///
/// # Errors
/// The device cannot be started.
pub fn open(config: &Config) -> Result<Ranks> {
    let contexts = devices::open_ranks(config)?;
    let first = contexts.first().map(|rank| rank.backend.info().description).unwrap_or_default();
    let description = if contexts.len() == 1 { first } else { format!("{first} × {} ranks", contexts.len()) };
    Ok(Ranks { contexts, description })
}

/// The pipeline's stages and what the tuning of micro-batches measured; `None` for a single stage.
#[must_use]
pub fn describe(pipeline: &PipelineStatus) -> Option<String> {
    if pipeline.stages.len() < 2 {
        return None;
    }
    let layers: Vec<String> = pipeline.stages.iter().map(|stage| stage.num_layers.to_string()).collect();
    let mut text = format!("stages of {} layers; {} micro-batches", layers.join(" + "), pipeline.micro_batches);
    for (at, sample) in pipeline.tuning.iter().enumerate() {
        let lead = if at == 0 { ", measured: " } else { ", " };
        // Writing to a text cannot fail.
        let _ = write!(text, "{lead}{} at {:.0} tok/s", sample.micro_batches, sample.tokens_per_s);
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_engine::{MicroBatchSample, StageStatus};

    #[test]
    fn the_choice_is_told_with_its_measurements() {
        let stage = |num_layers| StageStatus { num_layers, busy_us: 0 };
        let sample = |micro_batches, tokens_per_s| MicroBatchSample { micro_batches, tokens_per_s };
        let mut pipeline = PipelineStatus {
            micro_batches: 6,
            stages: vec![stage(16), stage(14)],
            tuning: [sample(4, 100.4), sample(6, 120.0), sample(9, 118.0)].into(),
            ..PipelineStatus::default()
        };
        assert_eq!(
            describe(&pipeline).as_deref(),
            Some("stages of 16 + 14 layers; 6 micro-batches, measured: 4 at 100 tok/s, 6 at 120 tok/s, 9 at 118 tok/s")
        );
        pipeline.stages.pop();
        assert_eq!(describe(&pipeline), None);
    }
}
