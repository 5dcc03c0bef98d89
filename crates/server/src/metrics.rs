//! `/metrics`: what is counted, and under which names. Latencies are measured by the server; gauges and
//! counters of the engine are read from its status at each scrape, so they cannot drift from the truth.
//!
//! Everything has a `pagemill_` name; what request routers read also has the `vllm:` name they look for.

use crate::state::ReadyModel;
use pagemill_engine::{EngineStatus, PipelineStatus};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The content type of [`Metrics::render`].
pub(crate) const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// Seconds: from a fast token to a long answer.
const LATENCY_BUCKETS: [f64; 19] =
    [0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 300.0];
/// Tokens.
const LENGTH_BUCKETS: [f64; 14] =
    [1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 32768.0, 131_072.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ModelLabels {
    model_name: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FinishLabels {
    model_name: String,
    finished_reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct HttpLabels {
    route: &'static str,
    status: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StageLabels {
    model_name: String,
    stage: u64,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TuningLabels {
    model_name: String,
    micro_batches: u64,
}

#[derive(Clone)]
struct Buckets(&'static [f64]);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

type Histograms = Family<ModelLabels, Histogram, Buckets>;

/// All metrics of a server.
pub(crate) struct Metrics {
    registry: Registry,
    time_to_first_token: Histograms,
    inter_token_latency: Histograms,
    time_per_output_token: Histograms,
    e2e_latency: Histograms,
    prompt_tokens: Histograms,
    generation_tokens: Histograms,
    success: Family<FinishLabels, Counter>,
    http_requests: Family<HttpLabels, Counter>,
}

impl Metrics {
    /// Metrics of a server whose model may come later.
    pub(crate) fn new(model: Arc<OnceLock<ReadyModel>>) -> Self {
        let latency = || Histograms::new_with_constructor(Buckets(&LATENCY_BUCKETS));
        let length = || Histograms::new_with_constructor(Buckets(&LENGTH_BUCKETS));
        let mut metrics = Self {
            registry: Registry::default(),
            time_to_first_token: latency(),
            inter_token_latency: latency(),
            time_per_output_token: latency(),
            e2e_latency: latency(),
            prompt_tokens: length(),
            generation_tokens: length(),
            success: Family::default(),
            http_requests: Family::default(),
        };
        let histograms = [
            (
                "time_to_first_token_seconds",
                "From a request's arrival to its first token",
                &metrics.time_to_first_token,
            ),
            ("inter_token_latency_seconds", "Between two tokens of a choice", &metrics.inter_token_latency),
            ("time_per_output_token_seconds", "Mean time per token after the first", &metrics.time_per_output_token),
            ("e2e_request_latency_seconds", "From a request's arrival to its end", &metrics.e2e_latency),
            ("request_prompt_tokens", "Prompt tokens of a request", &metrics.prompt_tokens),
            ("request_generation_tokens", "Generated tokens of a request", &metrics.generation_tokens),
        ];
        for prefix in ["pagemill_", "vllm:"] {
            for (name, help, family) in &histograms {
                metrics.registry.register(format!("{prefix}{name}"), *help, (*family).clone());
            }
            let help = "Choices that ended, by reason";
            metrics.registry.register(format!("{prefix}request_success"), help, metrics.success.clone());
        }
        let help = "HTTP answers by route and status";
        metrics.registry.register("pagemill_http_requests", help, metrics.http_requests.clone());
        metrics.registry.register_collector(Box::new(EngineCollector { model }));
        metrics
    }

    /// The histograms of one model.
    pub(crate) fn for_model(&self, name: &str) -> ModelMetrics {
        let labels = ModelLabels { model_name: name.to_owned() };
        ModelMetrics {
            time_to_first_token: self.time_to_first_token.get_or_create_owned(&labels),
            inter_token_latency: self.inter_token_latency.get_or_create_owned(&labels),
            time_per_output_token: self.time_per_output_token.get_or_create_owned(&labels),
            e2e_latency: self.e2e_latency.get_or_create_owned(&labels),
            prompt_tokens: self.prompt_tokens.get_or_create_owned(&labels),
            generation_tokens: self.generation_tokens.get_or_create_owned(&labels),
            stopped: self
                .success
                .get_or_create_owned(&FinishLabels { model_name: name.to_owned(), finished_reason: "stop" }),
            cut_off: self
                .success
                .get_or_create_owned(&FinishLabels { model_name: name.to_owned(), finished_reason: "length" }),
        }
    }

    /// Counts an answer.
    pub(crate) fn count_http(&self, route: &'static str, status: u16) {
        self.http_requests.get_or_create(&HttpLabels { route, status }).inc();
    }

    /// The scrape.
    ///
    /// # Errors
    /// Never for a `String`; the format's own error otherwise.
    pub(crate) fn render(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// What the server measures of one model's requests.
#[derive(Clone)]
pub(crate) struct ModelMetrics {
    time_to_first_token: Histogram,
    inter_token_latency: Histogram,
    time_per_output_token: Histogram,
    e2e_latency: Histogram,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    stopped: Counter,
    cut_off: Counter,
}

#[allow(clippy::cast_precision_loss)] // Token counts are far below 2^52.
fn as_f64(count: usize) -> f64 {
    count as f64
}

impl ModelMetrics {
    pub(crate) fn first_token(&self, since_arrival: Duration) {
        self.time_to_first_token.observe(since_arrival.as_secs_f64());
    }

    pub(crate) fn next_token(&self, since_last: Duration) {
        self.inter_token_latency.observe(since_last.as_secs_f64());
    }

    pub(crate) fn choice_ended(&self, finish_reason: &str) {
        if finish_reason == "length" {
            self.cut_off.inc()
        } else {
            self.stopped.inc()
        };
    }

    /// A request ended well; `decoding` is the time from its first token to its end.
    pub(crate) fn request_ended(&self, latency: Duration, decoding: Duration, prompt: usize, generated: usize) {
        self.e2e_latency.observe(latency.as_secs_f64());
        self.prompt_tokens.observe(as_f64(prompt));
        self.generation_tokens.observe(as_f64(generated));
        if generated > 1 {
            self.time_per_output_token.observe(decoding.as_secs_f64() / as_f64(generated - 1));
        }
    }
}

/// Reads the engine's status at each scrape.
struct EngineCollector {
    model: Arc<OnceLock<ReadyModel>>,
}

impl fmt::Debug for EngineCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineCollector").finish_non_exhaustive()
    }
}

enum Reading {
    Gauge(f64),
    Counter(u64),
}

#[allow(clippy::cast_precision_loss)] // Gauges: block and byte counts, far below 2^52.
fn shared_readings(status: &EngineStatus) -> Vec<(&'static str, &'static str, Reading)> {
    let kv = &status.kv_cache;
    let usage = if kv.num_blocks == 0 { 0.0 } else { kv.num_owned as f64 / kv.num_blocks as f64 };
    vec![
        ("num_requests_running", "Sequences that hold KV blocks", Reading::Gauge(status.scheduler.num_running as f64)),
        ("num_requests_waiting", "Requests that wait", Reading::Gauge(status.scheduler.num_waiting as f64)),
        ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", Reading::Gauge(usage)),
        ("prompt_tokens", "Prompt tokens computed", Reading::Counter(status.scheduler.prompt_tokens)),
        ("generation_tokens", "Tokens generated", Reading::Counter(status.scheduler.generated_tokens)),
        ("num_preemptions", "Preemptions", Reading::Counter(status.scheduler.preemptions)),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", Reading::Counter(kv.prefix_queries)),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache", Reading::Counter(kv.prefix_hits)),
    ]
}

#[allow(clippy::cast_precision_loss)] // As above.
fn own_readings(status: &EngineStatus) -> Vec<(&'static str, &'static str, Reading)> {
    let kv = &status.kv_cache;
    let (memory, host) = (&status.memory, &status.host);
    vec![
        ("kv_blocks", "KV blocks in the pool", Reading::Gauge(kv.num_blocks as f64)),
        ("kv_blocks_free", "KV blocks that are free", Reading::Gauge(kv.num_free as f64)),
        ("kv_blocks_cached", "KV blocks kept for the prefix cache only", Reading::Gauge(kv.num_cached as f64)),
        ("kv_blocks_owned", "KV blocks owned by sequences", Reading::Gauge(kv.num_owned as f64)),
        ("kv_evictions", "Cached KV blocks that had to make room", Reading::Counter(kv.evictions)),
        ("kv_copies_on_write", "KV blocks copied on write", Reading::Counter(kv.copies_on_write)),
        ("peak_running", "Most sequences running at once", Reading::Gauge(status.scheduler.peak_running as f64)),
        ("padding_tokens", "Padding slots computed", Reading::Counter(status.scheduler.padding_tokens)),
        ("filler_tokens", "Tokens computed where a stage would have idled", {
            Reading::Counter(status.scheduler.filler_tokens)
        }),
        ("ranks", "Ranks that the model is laid out over", Reading::Gauge(status.pipeline.num_ranks as f64)),
        ("micro_batches", "Steps in flight at most", Reading::Gauge(status.pipeline.micro_batches as f64)),
        ("pipeline_active_microseconds", "Time with a step in flight", { Reading::Counter(status.pipeline.active_us) }),
        ("steps", "Engine steps", Reading::Counter(status.steps)),
        ("stalled_seconds", "Time since a busy step loop last moved", {
            Reading::Gauge(Duration::from_micros(status.stalled_for_us).as_secs_f64())
        }),
        ("aborted_requests", "Requests aborted because nobody listened", Reading::Counter(status.aborted)),
        ("schedule_microseconds", "Time spent scheduling", Reading::Counter(status.schedule_us)),
        ("execute_microseconds", "Time spent executing", Reading::Counter(status.execute_us)),
        ("host_schedule_microseconds", "Host time of planning steps", Reading::Counter(host.schedule_ns / 1000)),
        ("host_layout_microseconds", "Host time of bringing batches to the device", {
            Reading::Counter(host.layout_ns / 1000)
        }),
        ("host_apply_microseconds", "Host time of taking outputs in", Reading::Counter(host.apply_ns / 1000)),
        ("host_deliver_microseconds", "Host time of telling listeners", Reading::Counter(host.deliver_ns / 1000)),
        ("host_exposed_microseconds", "Host time between two steps for which the device waited", {
            Reading::Counter(host.exposed_ns / 1000)
        }),
        ("steps_ahead", "Engine steps planned while the one before ran", Reading::Counter(host.steps_ahead)),
        (
            "steps_queued",
            "Engine steps that the device had before the draws of the one before were known to the host",
            Reading::Counter(host.steps_queued),
        ),
        ("workspace_grown", "Times the workspace grew after warm-up", Reading::Counter(status.workspace_grown)),
        ("weight_bytes", "Bytes of weights", Reading::Gauge(memory.weight_bytes as f64)),
        ("workspace_bytes", "Bytes of workspace", Reading::Gauge(memory.workspace_bytes as f64)),
        ("kv_pool_bytes", "Bytes of the KV pool", Reading::Gauge(memory.kv_pool_bytes as f64)),
    ]
}

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let Some(model) = self.model.get() else { return Ok(()) };
        let status = model.served.engine.status();
        let labels = ModelLabels { model_name: model.name().to_owned() };
        for (prefix, readings) in [
            ("vllm:", shared_readings(&status)),
            ("pagemill_", shared_readings(&status)),
            ("pagemill_", own_readings(&status)),
        ] {
            for (name, help, reading) in readings {
                encode_reading(&mut encoder, &format!("{prefix}{name}"), help, &reading, &labels)?;
            }
        }
        encode_pipeline(&mut encoder, &status.pipeline, model.name())
    }
}

/// What has one value for each stage, and the curve that the number of micro-batches was chosen from.
fn encode_pipeline(
    encoder: &mut DescriptorEncoder,
    pipeline: &PipelineStatus,
    model_name: &str,
) -> Result<(), fmt::Error> {
    let stages = || {
        pipeline.stages.iter().zip(0u64..).map(|(status, stage)| {
            let labels = StageLabels { model_name: model_name.to_owned(), stage };
            (status, labels)
        })
    };
    let help = "Time in steps, without waiting for the stages beside it";
    let name = "pagemill_stage_busy_microseconds";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (status, labels) in stages() {
        let none = None::<&Exemplar<StageLabels, f64>>;
        family.encode_family(&labels)?.encode_counter::<StageLabels, u64, f64>(&status.busy_us, none)?;
    }
    let help = "Share of the active time since start in which a stage had nothing to do, 0 to 1";
    let mut family = encoder.encode_descriptor("pagemill_stage_idle_share", help, None, MetricType::Gauge)?;
    for (status, labels) in stages() {
        family.encode_family(&labels)?.encode_gauge(&pipeline.idle_share(status))?;
    }
    let (name, help) = ("pagemill_micro_batch_tuning_tokens_per_second", "Measured at start, by steps in flight");
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for sample in pipeline.tuning.iter() {
        let labels = TuningLabels { model_name: model_name.to_owned(), micro_batches: sample.micro_batches as u64 };
        family.encode_family(&labels)?.encode_gauge(&sample.tokens_per_s)?;
    }
    Ok(())
}

fn encode_reading(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    reading: &Reading,
    labels: &ModelLabels,
) -> Result<(), fmt::Error> {
    match reading {
        Reading::Gauge(value) => {
            encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_family(labels)?.encode_gauge(value)
        }
        Reading::Counter(value) => encoder
            .encode_descriptor(name, help, None, MetricType::Counter)?
            .encode_family(labels)?
            .encode_counter::<ModelLabels, u64, f64>(value, None::<&Exemplar<ModelLabels, f64>>),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn both_name_families_are_published() {
        let metrics = Metrics::new(Arc::new(OnceLock::new()));
        let model = metrics.for_model("m");
        model.first_token(Duration::from_millis(3));
        model.choice_ended("length");
        metrics.count_http("/health", 200);
        let text = metrics.render().unwrap();
        for line in [
            r#"vllm:time_to_first_token_seconds_bucket{model_name="m",le="0.005"} 1"#,
            r#"pagemill_time_to_first_token_seconds_count{model_name="m"} 1"#,
            r#"vllm:request_success_total{model_name="m",finished_reason="length"} 1"#,
            r#"pagemill_http_requests_total{route="/health",status="200"} 1"#,
        ] {
            assert!(text.contains(line), "{line}\nin\n{text}");
        }
    }
}
