//! Streamed answers: framing byte by byte, and equality with whole answers.

use crate::support::{Setup, TestServer, sse_events};
use serde_json::{Value, json};
use std::io::Read;
use std::time::Duration;

const CHINESE: &str = "人人生而自由，在尊严和权利上";

fn stream(server: &TestServer, path: &str, mut request: Value) -> (String, Vec<Value>) {
    request["stream"] = json!(true);
    let reply = server.client().post(path, &request);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    assert_eq!(reply.header("cache-control"), Some("no-cache"));
    let text = reply.text();
    let events = sse_events(&text);
    (text, events)
}

/// Replaces what differs from run to run.
fn normalized(body: &str, events: &[Value]) -> String {
    let id = events[0]["id"].as_str().unwrap();
    let created = format!("\"created\":{}", events[0]["created"]);
    body.replace(id, "ID").replace(&created, "\"created\":0")
}

fn completion_text(events: &[Value]) -> String {
    events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect()
}

#[test]
fn d57_a_chat_stream_byte_for_byte() {
    let server = TestServer::start();
    let request = json!({"messages": [{"role": "user", "content": "Speak of the sea."}], "max_tokens": 2, "temperature": 0,
        "logit_bias": {"90": 100}, "stream_options": {"include_usage": true}});
    let (body, events) = stream(&server, "/v1/chat/completions", request);
    let chunk = |choice: &str| {
        format!(
            "data: {{\"id\":\"ID\",\"object\":\"chat.completion.chunk\",\"created\":0,\"model\":\"zoo\",\
             \"choices\":[{choice}],\"usage\":null}}\n\n"
        )
    };
    let prompt_tokens = events.last().unwrap()["usage"]["prompt_tokens"].as_u64().unwrap();
    let expected = [
        chunk("{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}"),
        chunk("{\"index\":0,\"delta\":{\"content\":\"w\"},\"logprobs\":null,\"finish_reason\":null}"),
        chunk("{\"index\":0,\"delta\":{\"content\":\"w\"},\"logprobs\":null,\"finish_reason\":null}"),
        chunk("{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"length\"}"),
        format!(
            "data: {{\"id\":\"ID\",\"object\":\"chat.completion.chunk\",\"created\":0,\"model\":\"zoo\",\"choices\":[],\
             \"usage\":{{\"prompt_tokens\":{prompt_tokens},\"completion_tokens\":2,\"total_tokens\":{},\
             \"prompt_tokens_details\":{{\"cached_tokens\":0}}}}}}\n\n",
            prompt_tokens + 2
        ),
        "data: [DONE]\n\n".to_owned(),
    ]
    .concat();
    assert_eq!(normalized(&body, &events), expected);
}

#[test]
fn d57_a_completion_stream_byte_for_byte() {
    let server = TestServer::start();
    let request = json!({"prompt": "Once", "max_tokens": 2, "temperature": 0, "logit_bias": {"90": 100}});
    let (body, events) = stream(&server, "/v1/completions", request);
    let chunk = |text: &str, finish: &str| {
        format!(
            "data: {{\"id\":\"ID\",\"object\":\"text_completion\",\"created\":0,\"model\":\"zoo\",\"choices\":\
             [{{\"text\":\"{text}\",\"index\":0,\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
        )
    };
    let expected =
        [chunk("w", "null"), chunk("w", "null"), chunk("", "\"length\""), "data: [DONE]\n\n".to_owned()].concat();
    assert_eq!(normalized(&body, &events), expected);
}

#[test]
fn d01_characters_are_never_torn() {
    let server = TestServer::start();
    let request = json!({"prompt": CHINESE, "max_tokens": 48, "temperature": 0, "logprobs": 2});
    let whole = server.ok("/v1/completions", &request);
    let text = whole["choices"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("一一切"), "{text}");
    let (body, events) = stream(&server, "/v1/completions", request);
    assert!(!body.contains('\u{FFFD}'));
    assert_eq!(completion_text(&events), text);
    // Log-probabilities come with the text they belong to, and all of them come.
    let streamed: Vec<Value> = events
        .iter()
        .flat_map(|e| e["choices"][0]["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(json!(streamed), whole["choices"][0]["logprobs"]["text_offset"]);
}

#[test]
fn d03_no_character_of_a_stop_string_is_streamed() {
    let server = TestServer::start();
    let base = json!({"prompt": CHINESE, "max_tokens": 40, "temperature": 0});
    let free = server.ok("/v1/completions", &base)["choices"][0]["text"].as_str().unwrap().to_owned();
    // Twelve tokens of one byte each: the string spans many tokens and is cut inside characters.
    let stop: String = free.chars().skip(2).take(4).collect();
    let mut request = base.clone();
    request["stop"] = json!([stop]);
    let (_, events) = stream(&server, "/v1/completions", request.clone());
    let text = completion_text(&events);
    assert_eq!(text, free.split(&stop).next().unwrap());
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
    let whole = server.ok("/v1/completions", &request);
    assert_eq!(whole["choices"][0]["text"], text);
    server.wait_idle(Duration::from_secs(5));
}

#[test]
fn d06_streamed_echo_equals_the_whole_answer() {
    let server = TestServer::start();
    let request = json!({"prompt": "The king said to the messenger that", "echo": true, "logprobs": 1, "max_tokens": 8,
        "temperature": 0});
    let whole = server.ok("/v1/completions", &request);
    let (_, events) = stream(&server, "/v1/completions", request);
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let joined: Vec<Value> = events
            .iter()
            .flat_map(|e| e["choices"][0]["logprobs"][list].as_array().cloned().unwrap_or_default())
            .collect();
        assert_eq!(json!(joined), whole["choices"][0]["logprobs"][list], "{list}");
    }
    assert_eq!(whole["choices"][0]["text"], completion_text(&events));
}

#[test]
fn d55_streamed_usage_equals_the_whole_answers() {
    let server = TestServer::start();
    let request =
        json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "ignore_eos": true, "seed": 5});
    let whole = server.ok("/v1/chat/completions", &request);
    assert_eq!(whole["usage"]["completion_tokens"], 10);
    let mut with_usage = request.clone();
    with_usage["stream_options"] = json!({"include_usage": true});
    let (_, events) = stream(&server, "/v1/chat/completions", with_usage);
    let (last, others) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 10);
    assert_eq!(last["usage"]["prompt_tokens"], whole["usage"]["prompt_tokens"]);
    assert!(others.iter().all(|e| e["usage"].is_null() && e.as_object().unwrap().contains_key("usage")));
    let (_, without) = stream(&server, "/v1/chat/completions", request);
    assert!(without.iter().all(|e| !e.as_object().unwrap().contains_key("usage")));
    let text: String = without.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], text);
}

#[test]
fn choices_are_interleaved_and_each_opens_and_ends_once() {
    let server = TestServer::start();
    let request = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "n": 3, "seed": 1,
        "ignore_eos": true});
    let whole = server.ok("/v1/chat/completions", &request);
    let (_, events) = stream(&server, "/v1/chat/completions", request);
    for index in 0..3 {
        let own: Vec<&Value> = events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == index).collect();
        assert_eq!(own.iter().filter(|c| c["delta"]["role"] == "assistant").count(), 1);
        assert_eq!(own.iter().filter(|c| c["finish_reason"] == "length").count(), 1);
        assert_eq!(own[0]["delta"]["role"], "assistant");
        let text: String = own.iter().filter_map(|c| c["delta"]["content"].as_str()).collect();
        assert_eq!(whole["choices"][index]["message"]["content"], text);
    }
    assert_ne!(whole["choices"][0]["message"]["content"], whole["choices"][1]["message"]["content"]);
}

#[test]
fn d57_reads_of_one_byte_see_the_same_stream() {
    let server = TestServer::start();
    let mut client = server.client();
    let body = json!({"prompt": CHINESE, "max_tokens": 8, "temperature": 0, "stream": true}).to_string();
    client.send(
        "POST",
        "/v1/completions",
        &[("content-type", "application/json"), ("connection", "close")],
        body.as_bytes(),
    );
    let mut raw = Vec::new();
    let mut byte = [0; 1];
    while client.socket.read(&mut byte).unwrap() == 1 {
        raw.push(byte[0]);
    }
    let text = String::from_utf8(raw).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(text.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"), "{text}");
}

#[test]
fn d58_silent_streams_carry_comments_when_asked_to() {
    let mut setup = Setup::long();
    setup.server.sse_keepalive = Some(Duration::from_millis(20));
    setup.engine.max_batch_size = Some(1);
    let server = TestServer::with(setup);
    let mut ahead = server.client();
    let long = json!({"prompt": "Once", "max_tokens": 1500, "ignore_eos": true}).to_string();
    ahead.send("POST", "/v1/completions", &[("content-type", "application/json")], long.as_bytes());
    std::thread::sleep(Duration::from_millis(50));
    let (body, events) = stream(&server, "/v1/completions", json!({"prompt": "Once", "max_tokens": 2}));
    assert!(body.starts_with(": keep-alive\n\n"), "{body}");
    assert!(!events.is_empty());
    assert_eq!(ahead.reply().status, 200);
}
