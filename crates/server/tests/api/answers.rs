//! Whole answers: their shape, their usage, and what ends them.

use crate::support::{MODEL, TestServer};
use serde_json::{Value, json};
use std::collections::BTreeSet;

const PROMPT: &str = "The king said to the messenger that";

fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn a_completion_has_the_apis_shape_and_the_models_text() {
    let server = TestServer::start();
    let answer = server.ok(
        "/v1/completions",
        &json!({"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": true}),
    );
    assert_eq!(keys(&answer), BTreeSet::from(["id", "object", "created", "model", "choices", "usage"]));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!(MODEL)));
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    // The reference implementation's greedy tokens, and margins wide enough to be sure of.
    let choice = &answer["choices"][0];
    assert_eq!(choice["token_ids"], json!([202, 58, 75, 390]));
    assert_eq!(choice["text"], "\nWhich");
    assert_eq!(
        (&choice["index"], &choice["finish_reason"], &choice["logprobs"]),
        (&json!(0), &json!("length"), &json!(null))
    );
    let usage = &answer["usage"];
    assert_eq!((usage["prompt_tokens"].as_u64(), usage["completion_tokens"].as_u64()), (Some(12), Some(4)));
    assert_eq!(usage["total_tokens"], 16);
    server.wait_idle(std::time::Duration::from_secs(5));
}

#[test]
fn a_chat_answer_has_the_apis_shape() {
    let server = TestServer::start();
    let messages =
        json!([{"role": "system", "content": "You are a poet."}, {"role": "user", "content": "Speak of the sea."}]);
    let answer = server.ok(
        "/v1/chat/completions",
        &json!({"messages": messages, "max_tokens": 4, "temperature": 0, "logprobs": true, "top_logprobs": 2}),
    );
    assert_eq!(keys(&answer), BTreeSet::from(["id", "object", "created", "model", "choices", "usage"]));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("chat.completion"), &json!(MODEL)));
    // 36 ids, as the reference implementation renders and tokenises this conversation: one BOS at most (D24).
    assert_eq!(answer["usage"]["prompt_tokens"], 36);
    let choice = &answer["choices"][0];
    assert_eq!(keys(choice), BTreeSet::from(["index", "message", "logprobs", "finish_reason"]));
    assert_eq!(choice["message"]["role"], "assistant");
    let content = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 4);
    let mut text = Vec::new();
    for entry in content {
        assert_eq!(keys(entry), BTreeSet::from(["token", "logprob", "bytes", "top_logprobs"]));
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
        text.extend(entry["bytes"].as_array().unwrap().iter().map(|b| b.as_u64().unwrap() as u8));
    }
    assert_eq!(String::from_utf8(text).unwrap(), choice["message"]["content"].as_str().unwrap());
}

#[test]
fn d03_stop_strings_end_the_text_and_are_not_part_of_it() {
    let server = TestServer::start();
    let base = json!({"prompt": "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of",
        "max_tokens": 12, "temperature": 0});
    let with = |extra: Value| {
        let mut request = base.clone();
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.ok("/v1/completions", &request)
    };
    let free = with(json!({}));
    let text = free["choices"][0]["text"].as_str().unwrap().to_owned();
    let stop: String = text.chars().skip(4).take(5).collect();
    let stopped = with(json!({"stop": stop}));
    let expected = text.split(&stop).next().unwrap();
    assert_eq!(stopped["choices"][0]["text"], expected);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert!(stopped["usage"]["completion_tokens"].as_u64() < free["usage"]["completion_tokens"].as_u64());
    let included = with(json!({"stop": [stop, "never"], "include_stop_str_in_output": true}));
    assert_eq!(included["choices"][0]["text"], format!("{expected}{stop}"));
    server.wait_idle(std::time::Duration::from_secs(5));
}

#[test]
fn d05_min_tokens_holds_stop_strings_and_end_tokens_off() {
    let server = TestServer::start();
    let request = json!({"prompt": "Once upon a time there was", "max_tokens": 60, "temperature": 0,
        "min_tokens": 30, "stop": ["e", "a", " "]});
    let answer = server.ok("/v1/completions", &request);
    let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert!((31..60).contains(&tokens), "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[test]
fn d06_offsets_of_echoed_logprobs_rise_without_a_gap() {
    let server = TestServer::start();
    let request = json!({"prompt": PROMPT, "echo": true, "logprobs": 1, "max_tokens": 8, "temperature": 0});
    let answer = server.ok("/v1/completions", &request);
    let choice = &answer["choices"][0];
    let text = choice["text"].as_str().unwrap();
    assert!(text.starts_with(PROMPT));
    let lists = &choice["logprobs"];
    let tokens: Vec<&str> = lists["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens.len(), 12 + 8);
    assert_eq!(tokens.concat(), text);
    let mut offset = 0;
    for (i, token) in tokens.iter().enumerate() {
        assert_eq!(lists["text_offset"][i], offset);
        offset += token.chars().count();
        let logprob = &lists["token_logprobs"][i];
        assert_eq!(logprob.is_null(), i == 0, "{i}");
        assert_eq!(lists["top_logprobs"][i].is_null(), i == 0);
    }
    // D45: a second time, with a warm prefix cache, nothing is missing.
    let again = server.ok("/v1/completions", &request);
    assert_eq!(again["choices"][0]["logprobs"], *lists);
}

#[test]
fn d07_logprobs_stay_finite_when_tokens_are_banned() {
    let server = TestServer::start();
    let bias: serde_json::Map<String, Value> = (3..512).map(|id: u32| (id.to_string(), json!(-100))).collect();
    let request = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": true,
        "top_logprobs": 20, "logit_bias": bias, "ignore_eos": true});
    let answer = server.ok("/v1/chat/completions", &request);
    for entry in answer["choices"][0]["logprobs"]["content"].as_array().unwrap() {
        assert!(entry["logprob"].as_f64().unwrap().is_finite());
        assert!(entry["top_logprobs"].as_array().unwrap().iter().all(|t| t["logprob"].as_f64().unwrap().is_finite()));
    }
}

#[test]
fn d09_d11_seeds_and_switched_off_filters() {
    let server = TestServer::start();
    let text = |extra: Value| {
        let mut request = json!({"prompt": PROMPT, "max_tokens": 16, "temperature": 1});
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.ok("/v1/completions", &request)["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let mut seen = BTreeSet::new();
    for seed in 1..=8 {
        let off = text(json!({"seed": seed}));
        assert_eq!(text(json!({"seed": seed, "top_k": 0})), off);
        assert_eq!(text(json!({"seed": seed, "top_k": -1})), off);
        seen.insert(off);
    }
    assert!(seen.len() > 4, "seeds make no difference: {seen:?}");
    let unseeded: BTreeSet<String> = (0..4).map(|_| text(json!({}))).collect();
    assert!(unseeded.len() > 1, "without a seed every answer is the same: {unseeded:?}");
}

#[test]
fn d10_tiny_temperatures_are_greedy() {
    let server = TestServer::start();
    let text = |temperature: f64| {
        let request = json!({"prompt": PROMPT, "max_tokens": 16, "temperature": temperature});
        server.ok("/v1/completions", &request)["choices"][0]["text"].clone()
    };
    let greedy = text(0.0);
    for temperature in [1e-5 / 2.0, 1e-20, 1e-45, -0.0] {
        assert_eq!(text(temperature), greedy, "{temperature}");
    }
}

#[test]
fn d18_no_tokens_at_all() {
    let server = TestServer::start();
    let request = json!({"prompt": PROMPT, "echo": true, "max_tokens": 0, "logprobs": 1});
    let answer = server.ok("/v1/completions", &request);
    assert_eq!(answer["choices"][0]["text"], PROMPT);
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), 12);
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let one = server.ok("/v1/completions", &json!({"prompt": PROMPT, "max_tokens": 1}));
    assert_eq!(one["usage"]["completion_tokens"], 1);
}

#[test]
fn d19_too_many_tokens_are_cut_to_the_context() {
    let server = TestServer::start();
    let request = json!({"prompt": [360, 383], "max_tokens": 10_000, "ignore_eos": true, "temperature": 0});
    let answer = server.ok("/v1/completions", &request);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["total_tokens"], 512);
}

#[test]
fn d21_choices_are_numbered_over_all_prompts() {
    let server = TestServer::start();
    let single = |prompt: &str| {
        server.ok(
            "/v1/completions",
            &json!({"prompt": prompt, "max_tokens": 4, "temperature": 0}),
        )["choices"][0]["text"]
            .clone()
    };
    let prompts = ["Once", PROMPT, "fn main() {"];
    let request = json!({"prompt": prompts, "max_tokens": 4, "temperature": 0, "n": 2});
    let answer = server.ok("/v1/completions", &request);
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 6);
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i);
        assert_eq!(choice["text"], single(prompts[i / 2]), "choice {i}");
    }
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    let ids = server.ok("/v1/completions", &json!({"prompt": [[360, 383], [50]], "max_tokens": 1}));
    assert_eq!(ids["usage"]["prompt_tokens"], 3);
}

#[test]
fn d52_end_tokens_stop_and_are_not_shown() {
    let server = TestServer::start();
    let forced = |id: u32, extra: Value| {
        let mut request = json!({"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": true,
            "logit_bias": {id.to_string(): 100}});
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.ok("/v1/completions", &request)
    };
    let ended = forced(2, json!({}));
    let choice = &ended["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["finish_reason"], &choice["token_ids"]),
        (&json!(""), &json!("stop"), &json!([2]))
    );
    assert_eq!(ended["usage"]["completion_tokens"], 1);
    let ignored = forced(2, json!({"ignore_eos": true}));
    assert_eq!(
        (&ended["usage"]["completion_tokens"], &ignored["choices"][0]["finish_reason"]),
        (&json!(1), &json!("length"))
    );
    assert_eq!(ignored["choices"][0]["text"], "");
    assert_eq!(
        forced(2, json!({"ignore_eos": true, "skip_special_tokens": false}))["choices"][0]["text"],
        "<|im_end|>".repeat(5)
    );
    let own = forced(90, json!({"stop_token_ids": [90]}));
    assert_eq!((&own["choices"][0]["text"], &own["choices"][0]["finish_reason"]), (&json!(""), &json!("stop")));
}

#[test]
fn d54_the_last_row_of_the_vocabulary_decodes() {
    let server = TestServer::start();
    let request = json!({"prompt": PROMPT, "max_tokens": 3, "logit_bias": {"511": 100}, "temperature": 0});
    assert_eq!(server.ok("/v1/completions", &request)["usage"]["completion_tokens"], 3);
}

#[test]
fn d56_the_token_limit_is_called_length() {
    let server = TestServer::start();
    let request = json!({"prompt": PROMPT, "max_tokens": 5, "ignore_eos": true});
    assert_eq!(server.ok("/v1/completions", &request)["choices"][0]["finish_reason"], "length");
}

#[test]
fn d02_hot_sampling_is_always_valid_json() {
    let server = TestServer::start();
    for seed in 0..40 {
        let request = json!({"prompt": "人人生而自由", "max_tokens": 60, "temperature": 2, "seed": seed,
            "repetition_penalty": 1.2, "ignore_eos": true, "logprobs": 5});
        let answer = server.ok("/v1/completions", &request);
        assert_eq!(answer["usage"]["completion_tokens"], 60);
    }
}

#[test]
fn d44_cached_tokens_are_told() {
    let server = TestServer::start();
    let request = json!({"prompt": "It was the best of times, it was the worst of times, it was the age of wisdom",
        "max_tokens": 2, "temperature": 0});
    let cold = server.ok("/v1/completions", &request);
    let warm = server.ok("/v1/completions", &request);
    assert_eq!(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(warm["usage"]["prompt_tokens_details"]["cached_tokens"], 16);
    assert_eq!(cold["choices"][0]["text"], warm["choices"][0]["text"]);
    // An answer that a stop string ends tells it, too.
    let mut stopped = request.clone();
    stopped["stop"] = json!([cold["choices"][0]["text"].as_str().unwrap().chars().next().unwrap().to_string()]);
    let stopped = server.ok("/v1/completions", &stopped);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["usage"]["prompt_tokens_details"]["cached_tokens"], 16);
    let salted = {
        let mut request = request.clone();
        request["cache_salt"] = json!("mine");
        server.ok("/v1/completions", &request)
    };
    assert_eq!(salted["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}
