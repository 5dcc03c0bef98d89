//! Puts the parts together: MODEL → checkpoint → device → engine (and text). Shows progress and the memory
//! that was taken.

use crate::config::{Config, LoadFormat};
use crate::processes::Leading;
use crate::{models, ranks};
use anyhow::Result;
use indicatif::{HumanBytes, ProgressBar};
use pagemill_engine::{EngineHandle, MemoryPlan, StartTimes, build_engine_on};
use pagemill_formats::Checkpoint;
use pagemill_model::{LoadProgress, ModelSpec};
use pagemill_server::TextAssets;
use std::path::Path;
use std::time::{Duration, Instant};

/// What loading prints (to standard error).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// A progress bar while weights are read.
    Progress,
    /// The bar, and the memory plan.
    Memory,
    /// Nothing, for benches.
    Nothing,
}

/// Where a model's ranks live.
#[derive(Clone, Copy)]
pub enum Home<'a> {
    /// In this process, as threads.
    Threads,
    /// In several processes, of which this one is rank 0.
    Processes(&'a Leading),
}

/// A running engine.
pub struct LoadedEngine {
    /// The way in.
    pub handle: EngineHandle,
    /// Shapes.
    pub spec: ModelSpec,
    /// Memory and limits.
    pub plan: MemoryPlan,
    /// The device's description.
    pub device: String,
    /// Opening the devices.
    pub device_time: Duration,
    /// The rest of the start, by part.
    pub times: StartTimes,
}

/// A running engine and everything about text.
pub struct LoadedModel {
    /// The engine.
    pub engine: LoadedEngine,
    /// Tokenizer, template, defaults.
    pub text: TextAssets,
}

/// Shapes and limits of the model at `path`, without loading weights.
///
/// # Errors
/// The file, field or tensor that is wrong.
pub fn read_spec(path: &Path) -> Result<ModelSpec> {
    let checkpoint = Checkpoint::open(path)?;
    Ok(pagemill_model::read_spec(&checkpoint)?)
}

/// Opens MODEL: its files, or its configuration alone where weights are made up.
///
/// # Errors
/// What cannot be found or read.
pub fn open(model: &str, config: &Config) -> Result<Checkpoint> {
    match config.load_format {
        LoadFormat::Stored => Ok(Checkpoint::open(&models::resolve(model)?)?),
        LoadFormat::Dummy(dummy_type) => Ok(Checkpoint::open_config(Path::new(model), dummy_type)?),
    }
}

/// Loads MODEL and starts its engine.
///
/// # Errors
/// One sentence about what cannot be found, read or fitted.
pub fn load_engine(model: &str, config: &Config, show: Show) -> Result<LoadedEngine> {
    load_engine_in(Home::Threads, model, config, show)
}

/// The same, wherever the ranks live.
///
/// # Errors
/// As [`load_engine`].
pub fn load_engine_in(home: Home<'_>, model: &str, config: &Config, show: Show) -> Result<LoadedEngine> {
    let checkpoint = open(model, config)?;
    start(&checkpoint, config, show, home)
}

/// Loads MODEL with tokenizer and template.
///
/// # Errors
/// As [`load_engine`].
pub fn load_model(model: &str, config: &Config, show: Show) -> Result<LoadedModel> {
    load_model_in(Home::Threads, model, config, show)
}

/// The same, wherever the ranks live.
///
/// # Errors
/// As [`load_engine`].
pub fn load_model_in(home: Home<'_>, model: &str, config: &Config, show: Show) -> Result<LoadedModel> {
    let checkpoint = open(model, config)?;
    // The vocabulary and the weights are independent of each other: both at once.
    std::thread::scope(|scope| {
        let text = scope.spawn(|| TextAssets::from_checkpoint(&checkpoint));
        let engine = start(&checkpoint, config, show, home)?;
        let text = text.join().map_err(|_| anyhow::anyhow!("loading the tokenizer failed"))??;
        Ok(LoadedModel { engine, text })
    })
}

fn start(checkpoint: &Checkpoint, config: &Config, show: Show, home: Home<'_>) -> Result<LoadedEngine> {
    // A layout that cannot be is a sentence before any thread is started.
    pagemill_model::plan_stages(checkpoint, config.engine.parallel)?;
    let bar = match show {
        Show::Nothing => ProgressBar::hidden(),
        Show::Progress | Show::Memory => models::pull::byte_bar(0, "loading weights"),
    };
    let progress = |progress: LoadProgress| {
        bar.set_length(progress.bytes_total);
        bar.set_position(progress.bytes_done);
    };
    let opening = Instant::now();
    let mut device_time = Duration::ZERO;
    let (built, device) = match home {
        Home::Threads => {
            let ranks::Ranks { contexts, description } = ranks::open(config)?;
            device_time = opening.elapsed();
            (build_engine_on(checkpoint, contexts, &config.engine, &progress)?, description)
        }
        Home::Processes(leading) => leading.build(checkpoint, config, &progress)?,
    };
    bar.finish_and_clear();
    let times = built.times;
    tracing::debug!(device = ?device_time, ?times.weights, ?times.rehearsal, ?times.pool, "started");
    if show == Show::Memory {
        eprintln!("{} on {device}, {} of weights", built.spec.architecture, HumanBytes(built.plan.weight_bytes));
        eprintln!("{}", built.plan);
        if let Some(text) = ranks::describe(&built.engine.status().pipeline) {
            eprintln!("{text}");
        }
    }
    Ok(LoadedEngine {
        handle: EngineHandle::spawn(built.engine),
        spec: built.spec,
        plan: built.plan,
        device,
        device_time,
        times,
    })
}
