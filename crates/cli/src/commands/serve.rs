//! `pagemill serve [MODEL]`: the OpenAI API over HTTP. Takes the port first, then loads the model; SIGTERM and
//! Ctrl-C drain.

use crate::config::{Config, ServeConfig};
use crate::loading::{self, Home, Show};
use crate::processes::{self, Leading, Part};
use crate::{ModelArgs, models, settings::ServerSettings};
use anyhow::{Result, anyhow, bail};
use clap::Args;
use pagemill_engine::EngineHandle;
use pagemill_server::{ModelFacts, RunningServer, ServedModel, ServerConfig, ServerState};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Arguments of `pagemill serve`.
#[derive(Args)]
pub struct ServeArgs {
    /// GGUF file, Hugging Face folder or repository (owner/name), or a name that `pagemill pull --list` shows [default: smollm2-135m]
    model: Option<String>,
    #[command(flatten)]
    server: ServerSettings,
    #[command(flatten)]
    shared: ModelArgs,
}

/// Serves until it is told to stop or its engine fails.
pub fn serve(args: ServeArgs) -> Result<()> {
    let started = Instant::now();
    let (file_model, engine, server) = args.shared.merge(args.server)?;
    let model = args.model.or(file_model).unwrap_or_else(|| models::catalogue::DEFAULT.to_owned());
    let config = crate::config::engine_config_among(processes::count()?, engine)?;
    let serve_config = crate::config::serve_config(&server)?;
    // A wrong name is a sentence before the port is taken.
    models::ModelRef::parse(&model)?;
    let leading = match processes::join(&config, serve_config.rank_port)? {
        Part::Following(following) => return following.run(&model, &config),
        Part::Leading(leading) => Some(Arc::new(leading)),
        Part::Alone => None,
    };
    let server_config = server_config(&serve_config);
    let listener = pagemill_server::bind(&server_config)?;
    let address = listener.to_string();
    let state = ServerState::new(server_config);
    let http = pagemill_server::spawn(listener, Arc::clone(&state))?;
    eprintln!("listening on http://{address}; loading {model}");

    let engine = match load_unless_stopped(model, config, server, &state, &http, leading.as_ref()) {
        Some(Ok(engine)) => engine,
        Some(Err(e)) => {
            http.stop();
            // The reason for stopping is the one that counts.
            let _ = http.join();
            return Err(e);
        }
        None => {
            if let Some(leading) = leading {
                leading.stop();
            }
            http.join()?;
            eprintln!("stopped before the model was loaded");
            return Ok(());
        }
    };
    eprintln!("ready after {:.2} s: http://{address}/v1", started.elapsed().as_secs_f64());
    let failed = wait(&engine, &http);
    let drained = http.join();
    engine.shutdown();
    let ended = leading.map_or(Ok(()), |leading| leading.end());
    if let Some(reason) = failed {
        bail!("the engine stopped: {reason}");
    }
    ended?;
    let drained = drained?;
    match drained.aborted {
        0 => eprintln!("stopped; every running request finished"),
        1 => eprintln!("stopped; 1 request did not finish within the drain timeout"),
        n => eprintln!("stopped; {n} requests did not finish within the drain timeout"),
    }
    Ok(())
}

fn server_config(config: &ServeConfig) -> ServerConfig {
    ServerConfig {
        host: config.host.clone(),
        port: config.port,
        api_keys: config.api_keys.clone(),
        cors_origins: config.cors_origins.clone(),
        drain_timeout: Duration::from_secs(config.drain_timeout_s),
        sse_keepalive: config.sse_keep_alive_s.map(Duration::from_secs),
        ..ServerConfig::default()
    }
}

/// Loads on a thread of its own, so that a signal need not wait for the weights. `None`: it came; the
/// unfinished thread ends with the process.
fn load_unless_stopped(
    model: String,
    config: Config,
    server: ServerSettings,
    state: &Arc<ServerState>,
    http: &RunningServer,
    leading: Option<&Arc<Leading>>,
) -> Option<Result<EngineHandle>> {
    let state = Arc::clone(state);
    let leading = leading.cloned();
    let (done, outcome) = mpsc::sync_channel(1);
    let spawned = thread::Builder::new().name("load".into()).spawn(move || {
        let home = leading.as_deref().map_or(Home::Threads, Home::Processes);
        // Nobody listens any more when a signal has come.
        let _ = done.send(load(home, &model, &config, &server, &state));
    });
    if let Err(e) = spawned {
        return Some(Err(anyhow::Error::from(e).context("starting a thread")));
    }
    loop {
        match outcome.recv_timeout(Duration::from_millis(50)) {
            Ok(result) => return Some(result),
            Err(RecvTimeoutError::Timeout) if http.is_finished() => return None,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Some(Err(anyhow!("loading the model failed"))),
        }
    }
}

/// Loads the model and opens the server for requests.
fn load(
    home: Home<'_>,
    model: &str,
    config: &Config,
    server: &ServerSettings,
    state: &ServerState,
) -> Result<EngineHandle> {
    let loaded = loading::load_model_in(home, model, config, Show::Memory)?;
    let defaults = loaded.text.defaults;
    if defaults != pagemill_server::SamplingDefaults::default() {
        eprintln!("sampling defaults of the model: {}", describe(&defaults));
    }
    let name = server.served_model_name.clone().unwrap_or_else(|| models::default_name(model));
    let engine = loaded.engine.handle.clone();
    let served = ServedModel {
        names: vec![name],
        engine: engine.clone(),
        tokenizer: loaded.text.tokenizer,
        template: loaded.text.template,
        facts: ModelFacts {
            vocab_size: loaded.engine.spec.vocab_size,
            max_seq_len: loaded.engine.plan.max_seq_len,
            eos_token_ids: loaded.text.eos_token_ids,
            defaults,
        },
    };
    if state.set_model(served).is_err() {
        bail!("a model is already served");
    }
    Ok(engine)
}

fn describe(defaults: &pagemill_server::SamplingDefaults) -> String {
    let named = [
        ("temperature", defaults.temperature.map(|v| v.to_string())),
        ("top_k", defaults.top_k.map(|v| v.to_string())),
        ("top_p", defaults.top_p.map(|v| v.to_string())),
        ("min_p", defaults.min_p.map(|v| v.to_string())),
        ("repetition_penalty", defaults.repetition_penalty.map(|v| v.to_string())),
    ];
    named.into_iter().filter_map(|(name, value)| value.map(|v| format!("{name} {v}"))).collect::<Vec<_>>().join(", ")
}

/// Returns when the server has drained, or with the reason when the engine stopped under it (clients have
/// heard of it by then). Launchers send SIGTERM to the survivors of a lost rank: both may be true at once, and
/// then the loss counts.
fn wait(engine: &EngineHandle, http: &RunningServer) -> Option<String> {
    loop {
        let has_drained = http.is_finished();
        if let Some(reason) = engine.status().stopped {
            http.stop();
            return Some(reason);
        }
        if has_drained {
            return None;
        }
        thread::sleep(Duration::from_millis(50));
    }
}
