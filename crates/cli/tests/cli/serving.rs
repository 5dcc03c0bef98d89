//! `pagemill serve` as a process: its port, its signals, its end.

use crate::binary::{PATIENCE, Running, assert_refused, pagemill, run, zoo};
use crate::http::{exchange, rest, send};
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::process::{ChildStderr, Stdio};
use std::time::{Duration, Instant};

struct Served {
    running: Running,
    errors: BufReader<ChildStderr>,
    address: String,
    _cache: tempfile::TempDir,
}

/// Slow enough that a stream is still running when a signal comes.
const SLOWLY: &[&str] = &["--isa", "scalar", "--threads", "1", "--activations", "f32"];

/// Starts the server on a free port and reads its address from what it prints.
fn serve(flags: &[&str]) -> Served {
    let cache = tempfile::tempdir().unwrap();
    let mut command = pagemill(cache.path());
    command.args(["serve", &zoo("llama").display().to_string(), "--port", "0"]).args(flags);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    errors.read_line(&mut line).unwrap();
    let address = line.strip_prefix("listening on http://").and_then(|l| l.split(';').next());
    let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
    Served { running: Running(child), errors, address, _cache: cache }
}

impl Served {
    fn until_ready(self) -> Self {
        let deadline = Instant::now() + PATIENCE;
        while exchange(&self.address, "GET", "/health", &[], "").0 != 200 {
            assert!(Instant::now() < deadline, "never ready");
            std::thread::sleep(Duration::from_millis(20));
        }
        self
    }

    /// A stream that takes a while: thousands of tokens that do not end early.
    fn long_stream(&self, tokens: usize) -> TcpStream {
        let body = format!(
            r#"{{"model":"llama","prompt":"the","max_tokens":{tokens},"stream":true,"ignore_eos":true,"seed":1}}"#
        );
        send(&self.address, "POST", "/v1/completions", &[], &body).unwrap()
    }

    fn said(mut self) -> String {
        let mut text = String::new();
        self.errors.read_to_string(&mut text).unwrap();
        assert!(!text.contains("panicked"), "{text}");
        text
    }
}

/// Waits until a stream has begun to answer.
fn first_bytes(stream: &mut TcpStream) -> String {
    let mut text = String::new();
    let mut byte = [0; 512];
    while !text.contains("data: ") {
        let n = stream.read(&mut byte).unwrap();
        assert!(n > 0, "ended early: {text}");
        text.push_str(&String::from_utf8_lossy(&byte[..n]));
    }
    text
}

#[test]
fn port_0_is_printed_and_answers() {
    let served = serve(&[]).until_ready();
    assert!(served.address.starts_with("127.0.0.1:") && !served.address.ends_with(":0"), "{}", served.address);
    let (status, answer) = exchange(&served.address, "GET", "/v1/models", &[], "");
    assert!(status == 200 && answer.contains("\"llama\""), "{answer}");
}

#[test]
fn a_pipeline_says_what_it_settled_on() {
    let served = serve(&["--pipeline-parallel-size", "2", "--tensor-parallel", "2"]).until_ready();
    let (status, metrics) = exchange(&served.address, "GET", "/metrics", &[], "");
    assert_eq!(status, 200);
    for part in
        ["pagemill_ranks{model_name=\"llama\"} 4", "tuning_tokens_per_second{model_name=\"llama\",micro_batches=\"4\"}"]
    {
        assert!(metrics.contains(part), "{part} in\n{metrics}");
    }
    served.running.signal("TERM");
    let said = served.said();
    for part in
        ["2 tensor-parallel × 2 pipeline-parallel", "stages of 2 + 2 layers; ", "micro-batches, measured: 4 at "]
    {
        assert!(said.contains(part), "{part} in\n{said}");
    }
}

#[test]
fn ipv6() {
    if TcpListener::bind("[::1]:0").is_err() {
        println!("skipped: this machine has no IPv6 loopback");
        return;
    }
    let served = serve(&["--host", "::1"]).until_ready();
    assert!(served.address.starts_with("[::1]:"), "{}", served.address);
}

#[test]
fn a_taken_port_is_refused_before_the_model_is_loaded() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    // A file that could not be loaded: the port is what is complained of.
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.gguf");
    std::fs::write(&broken, "GGUF").unwrap();
    let said = run(&["serve", &broken.display().to_string(), "--port", &port]);
    assert_refused(&said, &["already uses port", &port]);
}

#[test]
fn hosts_that_are_not_here() {
    let said = run(&["serve", &zoo("llama").display().to_string(), "--port", "0", "--host", "203.0.113.7"]);
    let line = assert_refused(&said, &["203.0.113.7", "not an address of this machine"]);
    assert_eq!(line.matches("annot assign").count(), 1, "{line}");
}

#[test]
fn a_key_is_asked_for() {
    let served = serve(&["--api-key", "first", "--api-key", "second"]).until_ready();
    let models = |headers: &[&str]| exchange(&served.address, "GET", "/v1/models", headers, "").0;
    assert_eq!(models(&[]), 401);
    assert_eq!(models(&["Authorization: Bearer wrong"]), 401);
    assert_eq!(models(&["Authorization: Bearer first"]), 200);
    assert_eq!(models(&["Authorization: Bearer second"]), 200);
    let said = run(&["serve", &zoo("llama").display().to_string(), "--port", "0", "--api-key", ""]);
    assert_refused(&said, &["api_key"]);
}

#[test]
fn sigterm_drains_under_load() {
    let mut served = serve(SLOWLY).until_ready();
    let mut streams: Vec<TcpStream> = (0..4).map(|_| served.long_stream(150)).collect();
    let begun: Vec<String> = streams.iter_mut().map(first_bytes).collect();
    served.running.signal("TERM");
    std::thread::sleep(Duration::from_millis(300));
    let refused = match send(&served.address, "GET", "/v1/models", &[], "") {
        Err(_) => true,
        Ok(stream) => {
            let answer = rest(stream);
            answer.is_empty() || answer.contains(" 503 ")
        }
    };
    for (stream, begun) in streams.into_iter().zip(begun) {
        let whole = begun + &rest(stream);
        assert!(whole.contains("data: [DONE]") && whole.contains("\"finish_reason\":\"length\""), "{whole}");
    }
    assert_eq!(served.running.wait(), Some(0));
    assert!(refused, "a new request was taken while draining");
    let said = served.said();
    assert!(said.contains("every running request finished"), "{said}");
}

#[test]
fn a_second_sigterm_ends_at_once() {
    let mut served = serve(SLOWLY).until_ready();
    let mut stream = served.long_stream(4000);
    first_bytes(&mut stream);
    served.running.signal("TERM");
    std::thread::sleep(Duration::from_millis(200));
    assert!(served.running.0.try_wait().unwrap().is_none(), "the stream was not waited for");
    served.running.signal("TERM");
    let code = served.running.wait();
    assert!(code.is_some_and(|c| c != 0), "{code:?}");
    assert!(!rest(stream).contains("[DONE]"));
    let said = served.said();
    assert!(said.contains("pagemill: stopped at once by a second signal"), "{said}");
}

#[test]
fn the_drain_timeout_is_kept() {
    let mut served = serve(&[SLOWLY, &["--drain-timeout", "0"]].concat()).until_ready();
    let mut stream = served.long_stream(4000);
    first_bytes(&mut stream);
    served.running.signal("INT");
    assert_eq!(served.running.wait(), Some(0));
    let said = served.said();
    assert!(said.contains("1 request did not finish"), "{said}");
}

#[test]
fn a_model_that_cannot_be_loaded_ends_the_server() {
    let folder = crate::binary::zoo_copy("llama");
    std::fs::write(folder.path().join("tokenizer.json"), "[]").unwrap();
    let said = run(&["serve", &folder.path().display().to_string(), "--port", "0"]);
    assert_eq!(said.code, Some(1));
    let lines: Vec<&str> = said.err.lines().filter(|l| l.starts_with("pagemill: ")).collect();
    assert!(lines.len() == 1 && lines[0].contains("tokenizer.json"), "{}", said.err);
}
