//! Fields that chat and completion requests share: sampling, stopping, delivery.

use super::{Delivery, GenerationOptions, LogprobsRequest, ModelFacts};
use crate::config::Limits;
use crate::error::ApiError;
use crate::wire::{SamplingFields, StreamOptions};
use pagemill_engine::SamplingParams;
use std::collections::BTreeMap;

/// Temperatures below this are greedy: dividing logits by them would overflow (D10).
const GREEDY_BELOW: f64 = 1e-5;
/// `request_id` and `cache_salt` in bytes.
const MAX_ID_BYTES: usize = 1024;

/// What an endpoint decides itself before the shared fields are judged.
pub(super) struct EndpointFields {
    /// `max_tokens` by whatever name; `None`: not given.
    pub(super) max_tokens: Option<usize>,
    /// Wanted log-probabilities.
    pub(super) logprobs: Option<LogprobsRequest>,
    /// Whether answers begin with the prompt.
    pub(super) echo: bool,
}

fn invalid(param: &str, requirement: impl std::fmt::Display, got: impl std::fmt::Display) -> ApiError {
    ApiError::bad_field(param, format!("Invalid value for '{param}': {got}; {requirement}.")).with_code("invalid_value")
}

/// A number within a closed interval. NaN is never within.
fn within(param: &str, value: Option<f64>, low: f64, high: f64) -> Result<Option<f64>, ApiError> {
    match value {
        Some(v) if !(low..=high).contains(&v) => {
            Err(invalid(param, format_args!("it must be between {low} and {high}"), v))
        }
        other => Ok(other),
    }
}

#[allow(clippy::cast_possible_truncation)] // Callers have bounded the value: only precision is lost.
fn narrow(value: f64) -> f32 {
    value as f32
}

/// A whole number within a closed interval.
pub(super) fn integer(param: &str, value: i64, low: u64, high: u64) -> Result<u64, ApiError> {
    u64::try_from(value)
        .ok()
        .filter(|v| (low..=high).contains(v))
        .ok_or_else(|| invalid(param, format_args!("it must be between {low} and {high}"), value))
}

/// `max_tokens` or one of its kin, at least `low`.
pub(super) fn max_tokens(param: &str, value: Option<i64>, low: u64) -> Result<Option<usize>, ApiError> {
    // Values past the context are cut to it later; past usize there is no difference.
    value.map(|v| integer(param, v, low, i64::MAX as u64).map(|v| usize::try_from(v).unwrap_or(usize::MAX))).transpose()
}

/// Judges the shared fields.
pub(super) fn validate(
    fields: SamplingFields,
    endpoint: EndpointFields,
    facts: &ModelFacts,
    limits: &Limits,
) -> Result<GenerationOptions, ApiError> {
    let n = u32::try_from(integer("n", fields.n.unwrap_or(1), 1, u64::from(limits.choices))?).unwrap_or(u32::MAX);
    let delivery = delivery(fields.stream, fields.stream_options.as_ref())?;
    check_label("request_id", fields.request_id.as_deref())?;
    check_label("cache_salt", fields.cache_salt.as_deref())?;
    let mut sampling = params(&fields, facts, limits)?;
    sampling.logprobs = endpoint.logprobs.map(|l| l.top);
    sampling.prompt_logprobs = endpoint.logprobs.filter(|_| endpoint.echo).map(|l| l.top);
    if let Some(max) = endpoint.max_tokens
        && sampling.min_tokens > max
    {
        return Err(invalid("min_tokens", "it must not exceed max_tokens", sampling.min_tokens));
    }
    Ok(GenerationOptions {
        n,
        seed: fields.seed.map(i64::cast_unsigned),
        max_tokens: endpoint.max_tokens,
        sampling,
        stop: stop_strings(fields.stop.map(|s| s.0).unwrap_or_default(), limits)?,
        include_stop_str_in_output: fields.include_stop_str_in_output,
        skip_special_tokens: fields.skip_special_tokens,
        priority: fields.priority,
        cache_salt: fields.cache_salt.map(String::into_bytes),
        logprobs: endpoint.logprobs,
        echo: endpoint.echo,
        return_token_ids: fields.return_token_ids,
        delivery,
    })
}

fn params(fields: &SamplingFields, facts: &ModelFacts, limits: &Limits) -> Result<SamplingParams, ApiError> {
    let defaults = &facts.defaults;
    let temperature = match within("temperature", fields.temperature, 0.0, 2.0)? {
        Some(t) if t < GREEDY_BELOW => 0.0,
        Some(t) => narrow(t),
        None => defaults.temperature.unwrap_or(1.0),
    };
    let top_p = match within("top_p", fields.top_p, 0.0, 1.0)? {
        // The bound is judged as the f32 it becomes: 1e-50 is 0.
        Some(p) if narrow(p) <= 0.0 => return Err(invalid("top_p", "it must be above 0 and at most 1", p)),
        Some(p) => narrow(p),
        None => defaults.top_p.unwrap_or(1.0),
    };
    let repetition_penalty = within("repetition_penalty", fields.repetition_penalty, 0.01, 100.0)?
        .map_or_else(|| defaults.repetition_penalty.unwrap_or(1.0), narrow);
    Ok(SamplingParams {
        temperature,
        top_k: top_k(fields.top_k, defaults.top_k)?,
        top_p,
        min_p: within("min_p", fields.min_p, 0.0, 1.0)?.map_or_else(|| defaults.min_p.unwrap_or(0.0), narrow),
        repetition_penalty,
        presence_penalty: within("presence_penalty", fields.presence_penalty, -2.0, 2.0)?.map_or(0.0, narrow),
        frequency_penalty: within("frequency_penalty", fields.frequency_penalty, -2.0, 2.0)?.map_or(0.0, narrow),
        logit_bias: logit_bias(&fields.logit_bias, facts.vocab_size, limits.logit_bias)?,
        seed: 0,
        logprobs: None,
        prompt_logprobs: None,
        min_tokens: usize::try_from(integer("min_tokens", fields.min_tokens.unwrap_or(0), 0, u64::from(u32::MAX))?)
            .unwrap_or(usize::MAX),
        stop_token_ids: stop_token_ids(fields, facts, limits)?,
    })
}

/// -1 and 0 switch the filter off (D09).
fn top_k(value: Option<i64>, default: Option<u32>) -> Result<Option<u32>, ApiError> {
    match value {
        None => Ok(default),
        Some(-1 | 0) => Ok(None),
        Some(k) if k > 0 => Ok(Some(u32::try_from(k).unwrap_or(u32::MAX))),
        Some(k) => Err(invalid("top_k", "it must be -1 or 0 (off) or at least 1", k)),
    }
}

fn logit_bias(sent: &BTreeMap<String, f64>, vocab_size: usize, limit: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    if sent.len() > limit {
        return Err(invalid("logit_bias", format_args!("at most {limit} entries are allowed"), sent.len()));
    }
    let mut biases = Vec::with_capacity(sent.len());
    for (key, &bias) in sent {
        let id = key.parse::<u32>().ok().filter(|&id| (id as usize) < vocab_size).ok_or_else(|| {
            let shown = crate::error::clip(key, 64);
            invalid("logit_bias", format_args!("keys must be token ids below {vocab_size}"), shown)
        })?;
        if !(-100.0..=100.0).contains(&bias) {
            return Err(invalid("logit_bias", "values must be between -100 and 100", bias));
        }
        biases.push((id, narrow(bias)));
    }
    biases.sort_by_key(|&(id, _)| id);
    // "5" and "05" are the same token.
    biases.dedup_by_key(|&mut (id, _)| id);
    Ok(biases)
}

/// The request's own stop tokens and, unless ignored, the model's end tokens; sorted, unique (D17, D52).
fn stop_token_ids(fields: &SamplingFields, facts: &ModelFacts, limits: &Limits) -> Result<Vec<u32>, ApiError> {
    let limit = limits.stop_token_ids;
    if fields.stop_token_ids.len() > limit {
        return Err(invalid(
            "stop_token_ids",
            format_args!("at most {limit} entries are allowed"),
            fields.stop_token_ids.len(),
        ));
    }
    let mut ids = super::token_ids(&fields.stop_token_ids, facts.vocab_size, "stop_token_ids")?;
    if !fields.ignore_eos {
        ids.extend(&facts.eos_token_ids);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn stop_strings(stop: Vec<String>, limits: &Limits) -> Result<Vec<String>, ApiError> {
    if stop.len() > limits.stop_strings {
        return Err(invalid("stop", format_args!("at most {} strings are allowed", limits.stop_strings), stop.len()));
    }
    for text in &stop {
        if text.is_empty() {
            return Err(invalid("stop", "stop strings must not be empty", "\"\""));
        }
        if text.len() > limits.stop_bytes {
            return Err(invalid(
                "stop",
                format_args!("a stop string holds at most {} bytes", limits.stop_bytes),
                format_args!("{} bytes", text.len()),
            ));
        }
    }
    Ok(stop)
}

fn delivery(stream: bool, options: Option<&StreamOptions>) -> Result<Delivery, ApiError> {
    let Some(options) = options else {
        return Ok(if stream { Delivery::Stream { include_usage: false } } else { Delivery::Whole });
    };
    if !stream {
        return Err(ApiError::bad_field("stream_options", "'stream_options' is only allowed with 'stream': true."));
    }
    if options.include_obfuscation == Some(true) {
        return Err(ApiError::unsupported("stream_options.include_obfuscation"));
    }
    Ok(Delivery::Stream { include_usage: options.include_usage.unwrap_or(false) })
}

fn check_label(param: &str, text: Option<&str>) -> Result<(), ApiError> {
    match text {
        Some(t) if t.is_empty() || t.len() > MAX_ID_BYTES => Err(invalid(
            param,
            format_args!("it must hold 1 to {MAX_ID_BYTES} bytes"),
            format_args!("{} bytes", t.len()),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::test_facts;
    use super::*;
    use crate::wire::StringOrList;

    fn judge(fields: SamplingFields) -> Result<GenerationOptions, ApiError> {
        let endpoint = EndpointFields { max_tokens: Some(300), logprobs: None, echo: false };
        validate(fields, endpoint, &test_facts(), &Limits::default())
    }

    fn refused_param(fields: SamplingFields) -> String {
        let error = judge(fields).unwrap_err();
        assert_eq!(error.status(), 400);
        error.param().unwrap().to_owned()
    }

    #[test]
    fn defaults_are_the_apis() {
        let options = judge(SamplingFields::default()).unwrap();
        assert_eq!(options.n, 1);
        assert!((options.sampling.temperature - 1.0).abs() < f32::EPSILON);
        assert_eq!(options.sampling.stop_token_ids, [2]);
        assert_eq!(options.delivery, Delivery::Whole);
    }

    #[test]
    fn model_defaults_hold_where_nothing_was_sent() {
        let mut facts = test_facts();
        facts.defaults.temperature = Some(0.2);
        facts.defaults.top_k = Some(7);
        let endpoint = || EndpointFields { max_tokens: None, logprobs: None, echo: false };
        let silent = validate(SamplingFields::default(), endpoint(), &facts, &Limits::default()).unwrap();
        assert_eq!((silent.sampling.temperature, silent.sampling.top_k), (0.2, Some(7)));
        let sent = SamplingFields { temperature: Some(0.5), top_k: Some(-1), ..Default::default() };
        let sent = validate(sent, endpoint(), &facts, &Limits::default()).unwrap();
        assert_eq!((sent.sampling.temperature, sent.sampling.top_k), (0.5, None));
    }

    #[test]
    fn d04_empty_stop_string_is_refused() {
        let stop = Some(StringOrList(vec![String::new()]));
        assert_eq!(refused_param(SamplingFields { stop, ..Default::default() }), "stop");
        let stop = Some(StringOrList(vec!["x".into(); 17]));
        assert_eq!(refused_param(SamplingFields { stop, ..Default::default() }), "stop");
        let stop = Some(StringOrList(vec!["x".repeat(1025)]));
        assert_eq!(refused_param(SamplingFields { stop, ..Default::default() }), "stop");
    }

    #[test]
    fn d09_top_k_zero_and_minus_one_are_off() {
        for (sent, want) in [(None, None), (Some(0), None), (Some(-1), None), (Some(5), Some(5))] {
            let options = judge(SamplingFields { top_k: sent, ..Default::default() }).unwrap();
            assert_eq!(options.sampling.top_k, want);
        }
        assert_eq!(refused_param(SamplingFields { top_k: Some(-2), ..Default::default() }), "top_k");
    }

    #[test]
    fn d10_tiny_temperatures_are_greedy() {
        for t in [0.0, -0.0, 1e-45, 1e-20, 9e-6] {
            let options = judge(SamplingFields { temperature: Some(t), ..Default::default() }).unwrap();
            assert_eq!(options.sampling.temperature.to_bits(), 0, "{t}");
        }
        for t in [-0.1, 2.1, f64::NAN, f64::INFINITY] {
            assert_eq!(refused_param(SamplingFields { temperature: Some(t), ..Default::default() }), "temperature");
        }
    }

    #[test]
    fn d12_negative_seeds_are_accepted() {
        let seed = |s| judge(SamplingFields { seed: Some(s), ..Default::default() }).unwrap().seed.unwrap();
        assert_eq!(seed(-1), u64::MAX);
        assert_eq!(seed(i64::MIN), 1 << 63);
        assert_eq!(seed(7), 7);
    }

    #[test]
    fn d15_logit_bias_outside_the_vocabulary_is_refused() {
        for (key, value) in [("512", 1.0), ("-1", 1.0), ("x", 1.0), ("5", 100.5), ("5", -101.0)] {
            let logit_bias = BTreeMap::from([(key.to_owned(), value)]);
            assert_eq!(refused_param(SamplingFields { logit_bias, ..Default::default() }), "logit_bias");
        }
        let logit_bias = BTreeMap::from([("511".to_owned(), -100.0), ("5".to_owned(), 1.0)]);
        let options = judge(SamplingFields { logit_bias, ..Default::default() }).unwrap();
        assert_eq!(options.sampling.logit_bias, [(5, 1.0), (511, -100.0)]);
    }

    #[test]
    fn d17_stop_token_ids_outside_the_vocabulary_are_refused() {
        for id in [512, -1, i64::MAX] {
            let fields = SamplingFields { stop_token_ids: vec![id], ..Default::default() };
            assert_eq!(refused_param(fields), "stop_token_ids");
        }
        let fields = SamplingFields { stop_token_ids: vec![9, 2, 9], ignore_eos: false, ..Default::default() };
        assert_eq!(judge(fields).unwrap().sampling.stop_token_ids, [2, 9]);
        let fields = SamplingFields { stop_token_ids: vec![9], ignore_eos: true, ..Default::default() };
        assert_eq!(judge(fields).unwrap().sampling.stop_token_ids, [9]);
    }

    #[test]
    fn ranges_are_the_apis() {
        let with = |set: fn(&mut SamplingFields)| {
            let mut fields = SamplingFields::default();
            set(&mut fields);
            refused_param(fields)
        };
        assert_eq!(with(|f| f.top_p = Some(0.0)), "top_p");
        assert_eq!(with(|f| f.top_p = Some(1e-60)), "top_p");
        assert_eq!(with(|f| f.top_p = Some(1.01)), "top_p");
        assert_eq!(with(|f| f.min_p = Some(-0.1)), "min_p");
        assert_eq!(with(|f| f.presence_penalty = Some(2.5)), "presence_penalty");
        assert_eq!(with(|f| f.frequency_penalty = Some(-2.5)), "frequency_penalty");
        assert_eq!(with(|f| f.repetition_penalty = Some(0.0)), "repetition_penalty");
        assert_eq!(with(|f| f.n = Some(0)), "n");
        assert_eq!(with(|f| f.n = Some(129)), "n");
        assert_eq!(with(|f| f.min_tokens = Some(-1)), "min_tokens");
        assert_eq!(with(|f| f.min_tokens = Some(301)), "min_tokens");
        assert_eq!(with(|f| f.cache_salt = Some(String::new())), "cache_salt");
    }

    #[test]
    fn stream_options_need_a_stream() {
        let options = || Some(StreamOptions { include_usage: Some(true), include_obfuscation: None });
        assert_eq!(refused_param(SamplingFields { stream_options: options(), ..Default::default() }), "stream_options");
        let streamed = judge(SamplingFields { stream: true, stream_options: options(), ..Default::default() }).unwrap();
        assert_eq!(streamed.delivery, Delivery::Stream { include_usage: true });
    }
}
