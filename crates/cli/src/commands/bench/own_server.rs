//! Pagemill's own server inside this process, on a free port: the same rooms as `pagemill serve`, without
//! signals and banners. For load generators that were not given another server.

use super::http::Server;
use crate::config::Config;
use crate::{loading, models, processes};
use anyhow::{Result, bail};
use pagemill_engine::EngineHandle;
use pagemill_server::{ModelFacts, RunningServer, ServedModel, ServerConfig, ServerState};

/// A running server and its engine.
pub struct OwnServer {
    http: RunningServer,
    engine: EngineHandle,
    /// Where it listens.
    pub server: Server,
    /// The device's description.
    pub device: String,
    /// Longest sequence it takes.
    pub max_seq_len: usize,
}

impl OwnServer {
    /// Loads MODEL and opens the port.
    ///
    /// # Errors
    /// As loading and listening.
    pub fn start(model: &str, config: &Config) -> Result<Self> {
        processes::ensure_alone("bench serve without --url")?;
        let loaded = loading::load_model(model, config, loading::Show::Nothing)?;
        let server_config = ServerConfig { host: "127.0.0.1".into(), port: 0, ..ServerConfig::default() };
        let listener = pagemill_server::bind(&server_config)?;
        let server = Server::parse(&format!("http://{listener}"), None)?;
        let state = ServerState::new(server_config);
        let (engine, device) = (loaded.engine.handle.clone(), loaded.engine.device);
        let max_seq_len = loaded.engine.plan.max_seq_len;
        let served = ServedModel {
            names: vec![models::default_name(model)],
            engine: engine.clone(),
            tokenizer: loaded.text.tokenizer,
            template: loaded.text.template,
            facts: ModelFacts {
                vocab_size: loaded.engine.spec.vocab_size,
                max_seq_len,
                eos_token_ids: loaded.text.eos_token_ids,
                defaults: loaded.text.defaults,
            },
        };
        if state.set_model(served).is_err() {
            bail!("a model is already served");
        }
        let http = pagemill_server::spawn(listener, state)?;
        Ok(Self { http, engine, server, device, max_seq_len })
    }

    /// Closes the port, then stops the engine.
    ///
    /// # Errors
    /// The server ended badly.
    pub fn stop(self) -> Result<()> {
        self.http.stop();
        self.http.join()?;
        self.engine.shutdown();
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::load::{self, Ask, Pacing};
    use super::super::workload::{Lengths, Random};
    use super::*;
    use crate::settings::EngineSettings;

    #[test]
    fn every_request_gets_all_its_tokens() {
        let settings =
            EngineSettings { threads: Some(1), kv_cache_bytes: Some("4MiB".into()), ..EngineSettings::default() };
        let config = crate::config::engine_config(settings).unwrap();
        let zoo = concat!(env!("CARGO_MANIFEST_DIR"), "/../testkit/zoo/llama");
        let own = OwnServer::start(zoo, &config).unwrap();
        let ask = Ask { model: load::first_model(&own.server).unwrap(), ignore_eos: true };
        assert_eq!(ask.model, "llama");
        let lengths = [Lengths { prompt: 5, generated: 6 }; 6];
        let jobs = load::jobs(&mut Random::new(1), &lengths, 0, Some(500.0));
        for pacing in [Pacing::Closed(3), Pacing::Open] {
            for outcome in load::run(&own.server, &ask, &jobs, pacing).unwrap() {
                let timeline = outcome.unwrap();
                assert_eq!(timeline.output_tokens, 6);
                assert!(timeline.prompt_tokens >= 5 && timeline.events.len() <= 6, "{timeline:?}");
            }
        }
        let unknown = Ask { model: "no-such-model".into(), ignore_eos: true };
        let refused = load::run(&own.server, &unknown, &jobs[..1], Pacing::Closed(1)).unwrap().remove(0).unwrap_err();
        assert!(refused.starts_with("status 404"), "{refused}");
        own.stop().unwrap();
    }
}
