//! `pagemill`: the binary. Parses what was typed and hands it to one command. Knows no tensor and no HTTP.

#![forbid(unsafe_code)]

mod arguments;
mod commands;
mod config;
mod devices;
mod environment;
mod loading;
mod models;
mod processes;
mod ranks;
mod settings;

use clap::{Args, Parser, Subcommand};
use settings::{EngineSettings, FileSettings, ServerSettings};
use std::path::PathBuf;
use std::process::ExitCode;

/// Serve large language models: paged KV memory, continuous batching, the OpenAI API.
#[derive(Parser)]
#[command(name = "pagemill", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// What to log: error, warn, info, debug or trace (a tracing filter)
    #[arg(
        long,
        global = true,
        env = "PAGEMILL_LOG",
        default_value = "warn",
        value_name = "FILTER",
        display_order = 900
    )]
    log: String,
}

#[derive(Subcommand)]
enum Command {
    /// Answer one prompt, streaming
    Run(commands::run::RunArgs),
    /// Talk with the model; Ctrl-C stops an answer, Ctrl-D leaves
    Chat(commands::chat::ChatArgs),
    /// Serve the OpenAI API
    Serve(commands::serve::ServeArgs),
    /// Fetch a model into the cache
    Pull(commands::pull::PullArgs),
    /// Show what is in a model file and what it will need in memory
    Inspect(commands::inspect::InspectArgs),
    /// Say what will fit, before anything is allocated
    Plan(commands::plan::PlanArgs),
    /// Measure
    Bench(commands::bench::BenchArgs),
}

/// The model and the engine's settings, shared by all commands that load one.
#[derive(Args, Clone)]
pub struct ModelArgs {
    /// What the engine does.
    #[command(flatten)]
    pub engine: EngineSettings,
    /// Settings file (TOML; keys are the flags' names with underscores)
    #[arg(long, env = "PAGEMILL_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
}

impl ModelArgs {
    /// Merges flags and variables with the settings file.
    fn merge(self, server: ServerSettings) -> anyhow::Result<(Option<String>, EngineSettings, ServerSettings)> {
        let file = match &self.config {
            Some(path) => settings::read_file(path)?,
            None => FileSettings::default(),
        };
        Ok((file.model, self.engine.or(file.engine), server.or(file.server)))
    }
}

fn main() -> ExitCode {
    let cli = match arguments::parse() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let filter = tracing_subscriber::EnvFilter::try_new(&cli.log);
    match filter {
        Ok(filter) => tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init(),
        Err(e) => {
            eprintln!("pagemill: --log {}: {e}", cli.log);
            return ExitCode::from(2);
        }
    }
    let result = match cli.command {
        Command::Run(args) => commands::run::run(args),
        Command::Chat(args) => commands::chat::chat(args),
        Command::Serve(args) => commands::serve::serve(args),
        Command::Pull(args) => commands::pull::pull(&args),
        Command::Inspect(args) => commands::inspect::inspect(&args),
        Command::Plan(args) => commands::plan::plan(args),
        Command::Bench(args) => commands::bench::bench(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("pagemill: {}", sentence(&e));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes on one line. Many errors already say their cause: it is not said twice.
fn sentence(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    line.lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join("; ")
}

/// The reader of our output went away (`pagemill inspect x | head`): no fault.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_cause_is_said_once() {
        let io = || std::io::Error::other("disk on fire");
        let said = anyhow::Error::from(settings::SettingsError::Read { path: "a.toml".into(), source: io() });
        assert_eq!(sentence(&said), "a.toml: disk on fire");
        let unsaid = Err::<(), _>(io()).context("reading b").map_err(|e| sentence(&e));
        assert_eq!(unsaid, Err("reading b: disk on fire".to_owned()));
        assert_eq!(sentence(&anyhow::anyhow!("two\n\n  lines\n")), "two; lines");
    }
}
