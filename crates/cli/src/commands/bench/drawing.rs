//! How a benchmark's tokens are chosen. Knows no engine that runs.

use anyhow::{Result, bail};
use clap::Args;
use pagemill_engine::SamplingParams;

/// Sampling of every request of a run.
#[derive(Args)]
pub struct DrawingArgs {
    /// Temperature of the draws; 0: the likeliest token
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Draw from the likeliest tokens that make up this share
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Draw from so many likeliest tokens [default: all]
    #[arg(long)]
    top_k: Option<u32>,
}

impl DrawingArgs {
    /// As the engine takes it; every request has the same seed.
    ///
    /// # Errors
    /// A value out of its range.
    pub fn params(&self, seed: u64) -> Result<SamplingParams> {
        let is_share = self.top_p > 0.0 && self.top_p <= 1.0;
        if !is_share || !(0.0..=100.0).contains(&self.temperature) {
            bail!("temperature must be from 0 to 100, top_p above 0 and at most 1");
        }
        let (temperature, top_p, top_k) = (self.temperature, self.top_p, self.top_k);
        Ok(SamplingParams { temperature, top_p, top_k, seed, ..SamplingParams::default() })
    }

    /// For reports.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({ "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k })
    }
}
