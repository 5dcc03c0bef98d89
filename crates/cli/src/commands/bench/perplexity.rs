//! `pagemill bench perplexity`: llama.cpp's perplexity protocol through the engine's own prompt
//! log-probabilities, so that the number judges what is served: kernels, KV cache, sampler and tokenizer.
//!
//! The text is encoded once and cut into windows that do not overlap. Where the model wants a beginning
//! token, it stands in for the first token of each window. Of a window, the tokens of the second half are
//! scored: they have at least half a window of context.

use crate::loading::{self, LoadedModel};
use crate::{ModelArgs, models::catalogue, settings::ServerSettings};
use anyhow::{Context, Result, bail};
use clap::Args;
use pagemill_engine::{ChannelSink, Request, SamplingParams};
use serde::Deserialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Arguments of `pagemill bench perplexity`.
#[derive(Args)]
pub struct PerplexityArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows [default: smollm2-135m]
    model: Option<String>,
    #[command(flatten)]
    shared: ModelArgs,
    /// Text to score (UTF-8)
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Bytes of the text to read at most
    #[arg(long, default_value_t = 200_000)]
    bytes: usize,
    /// Tokens in a window; its second half is scored
    #[arg(long, default_value_t = 512)]
    window: usize,
    /// Windows to score at most [default: all]
    #[arg(long, value_name = "N")]
    max_windows: Option<usize>,
    /// JSON with `cumulative`: the perplexity after each window, to compare with
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,
    /// Fail when the perplexity differs from the reference's by more than this
    #[arg(long, value_name = "PERCENT", requires = "reference")]
    tolerance: Option<f64>,
    /// Print one JSON object instead of sentences
    #[arg(long)]
    json: bool,
}

/// What a reference file holds, as far as it is needed.
#[derive(Deserialize)]
struct Reference {
    cumulative: Vec<f64>,
}

/// Sums over scored tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Score {
    tokens: u64,
    nll: f64,
    nll_squared: f64,
}

impl Score {
    fn add(&mut self, logprob: f32) {
        let nll = -f64::from(logprob);
        self.tokens += 1;
        self.nll += nll;
        self.nll_squared += nll * nll;
    }

    #[allow(clippy::cast_precision_loss)] // a count of tokens
    fn perplexity(&self) -> f64 {
        (self.nll / self.tokens as f64).exp()
    }

    /// Standard error of the perplexity, to first order.
    #[allow(clippy::cast_precision_loss)] // a count of tokens
    fn standard_error(&self) -> f64 {
        let count = self.tokens as f64;
        let mean = self.nll / count;
        let variance = (self.nll_squared / count - mean * mean).max(0.0);
        (variance / (count - 1.0).max(1.0)).sqrt() * mean.exp()
    }
}

/// Measures.
pub fn perplexity(args: PerplexityArgs) -> Result<()> {
    if args.window < 4 || args.max_windows == Some(0) {
        bail!("window must be at least 4, max_windows at least 1");
    }
    let reference = args.reference.as_deref().map(read_reference).transpose()?;
    let text = read_text(&args.text, args.bytes)?;
    let (file_model, engine, _) = args.shared.clone().merge(ServerSettings::default())?;
    let model = args.model.clone().or(file_model).unwrap_or_else(|| catalogue::DEFAULT.to_owned());
    let mut config = crate::config::engine_config(engine)?;
    config.engine.prefix_cache = false;
    config.engine.max_batch_size.get_or_insert(1);
    config.engine.max_seq_len.get_or_insert(args.window + 1);
    let loaded = loading::load_model(&model, &config, loading::Show::Nothing)?;
    let windows = windows(&loaded, &text, args.window)?;
    let count = windows.len().min(args.max_windows.unwrap_or(usize::MAX));
    let start = Instant::now();
    let mut score = Score::default();
    let mut cumulative = Vec::with_capacity(count);
    for window in windows.into_iter().take(count) {
        score_window(&loaded, window, &mut score)?;
        cumulative.push(score.perplexity());
    }
    let seconds = start.elapsed().as_secs_f64();
    loaded.engine.handle.shutdown();
    let compared = reference.map(|r| compare(&cumulative, &r.cumulative)).transpose()?;
    let activations = crate::devices::activations(&config).to_owned();
    let report = Report { model, activations, score, cumulative, compared, seconds };
    report.print(&args, &config, &loaded.engine.device)?;
    match (report.compared, args.tolerance) {
        (Some(compared), Some(tolerance)) if compared.last_percent.abs() > tolerance => {
            bail!("perplexity differs by {:+.3} %, more than {tolerance} %", compared.last_percent)
        }
        _ => Ok(()),
    }
}

fn read_reference(path: &Path) -> Result<Reference> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{}: expected an object with `cumulative`", path.display()))
}

/// The first `bytes` bytes, less what would cut a character.
fn read_text(path: &Path, bytes: usize) -> Result<String> {
    let mut text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    text.truncate((0..=bytes.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0));
    Ok(text)
}

/// Whole windows of the text's tokens, the beginning token in front of each where the model wants it.
fn windows(loaded: &LoadedModel, text: &str, window: usize) -> Result<Vec<Vec<u32>>> {
    let tokenizer = &loaded.text.tokenizer;
    let ids = tokenizer.encode_completion(text)?;
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    let windows: Vec<Vec<u32>> = ids
        .chunks_exact(window)
        .map(|tokens| {
            let mut tokens = tokens.to_vec();
            if let (Some(bos), Some(first)) = (bos, tokens.first_mut()) {
                *first = bos;
            }
            tokens
        })
        .collect();
    if windows.is_empty() {
        bail!("the text has {} tokens, less than one window of {window}", ids.len());
    }
    Ok(windows)
}

/// Adds the log-probabilities of the tokens at positions `window / 2 + 1 ..` of `window`.
fn score_window(loaded: &LoadedModel, window: Vec<u32>, score: &mut Score) -> Result<()> {
    let length = window.len();
    let (sink, _) = ChannelSink::new(1);
    let request = Request {
        prompt: window,
        max_tokens: 0,
        n: 1,
        sampling: SamplingParams { prompt_logprobs: Some(0), ..SamplingParams::default() },
        priority: 0,
        cache_salt: None,
        sink: Box::new(sink),
    };
    let generation = loaded.engine.handle.generate(request)?;
    // Entry `i` is that of position `i + 1`: the token at position 0 has none.
    if generation.prompt_logprobs.len() != length - 1 {
        bail!("{} log-probabilities came for a window of {length} tokens", generation.prompt_logprobs.len());
    }
    for entry in &generation.prompt_logprobs[length / 2..] {
        score.add(entry.logprob);
    }
    Ok(())
}

/// Differences from a reference, in percent of it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Compared {
    reference: f64,
    last_percent: f64,
    largest_percent: f64,
}

/// Compares perplexities after each window; the reference may go on longer than we did.
fn compare(ours: &[f64], reference: &[f64]) -> Result<Compared> {
    if ours.len() > reference.len() {
        bail!("the reference has {} windows, this run {}", reference.len(), ours.len());
    }
    let percent = |(a, b): (&f64, &f64)| 100.0 * (a / b - 1.0);
    let differences: Vec<f64> = ours.iter().zip(reference).map(percent).collect();
    let (Some(&last_percent), Some(&reference)) = (differences.last(), reference.get(ours.len().saturating_sub(1)))
    else {
        bail!("no window was scored");
    };
    let largest_percent = differences.iter().map(|d| d.abs()).fold(0.0, f64::max);
    Ok(Compared { reference, last_percent, largest_percent })
}

struct Report {
    model: String,
    activations: String,
    score: Score,
    cumulative: Vec<f64>,
    compared: Option<Compared>,
    seconds: f64,
}

impl Report {
    fn print(&self, args: &PerplexityArgs, config: &crate::config::Config, device: &str) -> Result<()> {
        let mut out = std::io::stdout().lock();
        let (ppl, stderr) = (self.score.perplexity(), self.score.standard_error());
        if args.json {
            let report = serde_json::json!({
                "bench": "perplexity", "model": self.model, "device": device, "activations": self.activations,
                "kv_dtype": config.engine.kv_dtype.name(), "text": args.text, "bytes": args.bytes,
                "window": args.window, "chunks": self.cumulative.len(), "n_tokens": self.score.tokens, "ppl": ppl,
                "stderr": stderr, "seconds": self.seconds, "cumulative": self.cumulative,
                "reference_ppl": self.compared.map(|c| c.reference),
                "difference_percent": self.compared.map(|c| c.last_percent),
                "largest_difference_percent": self.compared.map(|c| c.largest_percent),
            });
            writeln!(out, "{report}")?;
            return Ok(());
        }
        writeln!(
            out,
            "{} on {device}; {} activations, {} KV; {} windows of {} tokens, {} tokens scored in {:.1} s",
            self.model,
            self.activations,
            config.engine.kv_dtype,
            self.cumulative.len(),
            args.window,
            self.score.tokens,
            self.seconds
        )?;
        writeln!(out, "perplexity {ppl:.4} ± {stderr:.4}")?;
        if let Some(compared) = self.compared {
            writeln!(
                out,
                "reference {:.4}: {:+.4} %; after each window at most {:.4} % apart",
                compared.reference, compared.last_percent, compared.largest_percent
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_uniform_guess_has_the_vocabulary_as_perplexity() {
        let mut score = Score::default();
        for _ in 0..10 {
            score.add(-(50.0_f32.ln()));
        }
        assert!((score.perplexity() - 50.0).abs() < 1e-4);
        assert!(score.standard_error() < 1e-3);
    }

    #[test]
    fn the_standard_error_is_that_of_the_mean() {
        let mut score = Score::default();
        score.add(-1.0);
        score.add(-3.0);
        // Mean 2, variance 1, over 2 - 1 tokens.
        assert!((score.standard_error() - 2.0_f64.exp()).abs() < 1e-9);
    }

    #[test]
    fn differences_are_taken_window_by_window() {
        let compared = compare(&[11.0, 20.2], &[10.0, 20.0, 30.0]).unwrap();
        assert!((compared.last_percent - 1.0).abs() < 1e-9 && (compared.largest_percent - 10.0).abs() < 1e-9);
        assert!(compare(&[1.0, 2.0], &[1.0]).is_err());
    }

    #[test]
    fn the_second_half_of_a_window_is_scored() {
        let settings = crate::settings::EngineSettings {
            threads: Some(1),
            kv_cache_bytes: Some("4MiB".into()),
            ..Default::default()
        };
        let config = crate::config::engine_config(settings).unwrap();
        let zoo = concat!(env!("CARGO_MANIFEST_DIR"), "/../testkit/zoo/llama");
        let loaded = loading::load_model(zoo, &config, loading::Show::Nothing).unwrap();
        let windows = windows(&loaded, &"the cat sat on the mat. ".repeat(40), 32).unwrap();
        let mut score = Score::default();
        for window in windows.iter().take(2) {
            score_window(&loaded, window.clone(), &mut score).unwrap();
        }
        assert_eq!(score.tokens, 2 * 15);
        // A tiny model of random weights knows next to nothing.
        let guess = loaded.engine.spec.vocab_size as f64;
        assert!(score.perplexity() > 1.0 && score.perplexity() < 10.0 * guess, "{}", score.perplexity());
        loaded.engine.handle.shutdown();
    }

    #[test]
    fn text_is_cut_between_characters() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "aé").unwrap();
        assert_eq!(read_text(file.path(), 2).unwrap(), "a");
        assert_eq!(read_text(file.path(), 9).unwrap(), "aé");
    }
}
