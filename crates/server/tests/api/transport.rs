//! HTTP itself: methods, headers, keys, limits, connections.

use crate::support::{Client, Setup, TestServer};
use serde_json::json;
use std::io::Write;
use std::time::Duration;

fn raw(client: &mut Client, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> u16 {
    client.send(method, path, headers, body);
    let reply = client.reply();
    if reply.status >= 400 {
        assert_eq!(reply.header("content-type"), Some("application/json"), "{method} {path}");
        assert!(reply.json()["error"]["message"].is_string());
    }
    reply.status
}

#[test]
fn d60_malformed_bodies_are_400() {
    let server = TestServer::start();
    let json_type = ("content-type", "application/json");
    let mut client = server.client();
    for body in
        ["", "{", "not json", "[]", "null", "\"a\"", "{\"prompt\":\"a\"} x", "{\"prompt\":\"a\",\"prompt\":\"b\"}"]
    {
        assert_eq!(raw(&mut client, "POST", "/v1/completions", &[json_type], body.as_bytes()), 400, "{body}");
    }
    let good = br#"{"prompt":"a","max_tokens":1}"#;
    assert_eq!(raw(&mut client, "POST", "/v1/completions", &[], good), 400);
    assert_eq!(raw(&mut client, "POST", "/v1/completions", &[("content-type", "text/plain")], good), 415);
    let with_charset = [("content-type", "application/json; charset=utf-8")];
    assert_eq!(raw(&mut client, "POST", "/v1/completions", &with_charset, good), 200);
}

#[test]
fn d77_unknown_routes_and_wrong_methods_are_error_objects() {
    let server = TestServer::start();
    let mut client = server.client();
    assert_eq!(raw(&mut client, "GET", "/nothing", &[], b""), 404);
    assert_eq!(raw(&mut client, "POST", "/nothing", &[], b"{}"), 404);
    client.send("GET", "/v1/completions", &[], b"");
    let reply = client.reply();
    assert_eq!((reply.status, reply.header("allow")), (405, Some("POST, OPTIONS")));
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert_eq!(raw(&mut client, "DELETE", "/v1/models/zoo", &[], b""), 405);
    for path in ["/health", "/v1/models", "/version", "/openapi.json", "/metrics"] {
        client.send("HEAD", path, &[], b"");
        assert_eq!(client.reply_without_body().status, 200, "{path}");
    }
    client.send("HEAD", "/v1/completions", &[], b"");
    assert_eq!(client.reply_without_body().status, 405);
    client.send("OPTIONS", "/v1/completions", &[], b"");
    let reply = client.reply_without_body();
    assert_eq!((reply.status, reply.header("allow")), (204, Some("POST, OPTIONS")));
    assert_eq!(client.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(client.get("/openapi.json").json()["openapi"], "3.1.0");
}

#[test]
fn keys_guard_everything_but_probes() {
    let mut setup = Setup::default();
    setup.server.api_keys = vec!["sekrit".to_owned()];
    let server = TestServer::with(setup);
    let mut client = server.client();
    for path in ["/health", "/version", "/metrics"] {
        assert_eq!(client.get(path).status, 200);
    }
    client.send("GET", "/v1/models", &[], b"");
    let reply = client.reply();
    assert_eq!((reply.status, reply.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(reply.json()["error"]["code"], "invalid_api_key");
    assert_eq!(raw(&mut client, "GET", "/v1/models", &[("authorization", "Bearer wrong")], b""), 401);
    assert_eq!(raw(&mut client, "GET", "/v1/models", &[("authorization", "Bearer sekrit")], b""), 200);
    assert_eq!(raw(&mut client, "POST", "/v1/completions", &[("content-type", "application/json")], b"{}"), 401);
    assert_eq!(raw(&mut client, "GET", "/nothing", &[], b""), 401);
}

#[test]
fn d59_preflights_need_no_key() {
    let mut setup = Setup::default();
    setup.server.api_keys = vec!["sekrit".to_owned()];
    setup.server.cors_origins = vec!["https://app.example".to_owned()];
    let server = TestServer::with(setup);
    let mut client = server.client();
    let preflight = |origin: &'static str| {
        [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ]
    };
    client.send("OPTIONS", "/v1/chat/completions", &preflight("https://app.example"), b"");
    let reply = client.reply();
    assert!(matches!(reply.status, 200 | 204));
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://app.example"));
    assert_eq!(reply.header("access-control-allow-headers"), Some("authorization,content-type"));
    client.send("OPTIONS", "/v1/chat/completions", &preflight("https://evil.example"), b"");
    assert_eq!(client.reply().header("access-control-allow-origin"), None);
    // The refusal itself is readable by the page, and a POST without a key is refused.
    let headers = [("origin", "https://app.example"), ("content-type", "application/json")];
    client.send("POST", "/v1/chat/completions", &headers, b"{}");
    let reply = client.reply();
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (401, Some("https://app.example")));
}

#[test]
fn d62_request_ids_are_ours_and_the_clients_is_echoed() {
    let server = TestServer::start();
    let request = json!({"prompt": "a", "max_tokens": 1, "request_id": "id"}).to_string();
    let headers = [("content-type", "application/json"), ("x-request-id", "id")];
    let mut clients = [server.client(), server.client()];
    for client in &mut clients {
        client.send("POST", "/v1/completions", &headers, request.as_bytes());
    }
    let replies = clients.map(|mut client| client.reply());
    let ids: Vec<_> = replies
        .iter()
        .map(|reply| {
            assert_eq!((reply.status, reply.header("x-request-id")), (200, Some("id")));
            reply.json()["id"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_ne!(ids[0], ids[1]);
    assert!(ids.iter().all(|id| id != "id"));
    assert!(server.client().get("/health").header("x-request-id").unwrap().starts_with("req-"));
}

#[test]
fn d76_a_connection_survives_or_is_closed_after_an_early_refusal() {
    let mut setup = Setup::default();
    setup.server.limits.body_bytes = 1 << 20;
    let server = TestServer::with(setup);
    let mut client = server.client();
    let length = 24 << 20;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    client.socket.write_all(head.as_bytes()).unwrap();
    let block = vec![b' '; 1 << 20];
    for _ in 0..length / block.len() {
        client.socket.write_all(&block).unwrap();
    }
    let reply = client.reply();
    assert_eq!((reply.status, reply.header("connection")), (413, Some("close")));
    assert!(reply.json()["error"]["message"].is_string());
    assert!(client.is_closed());

    // A body without a length is counted as it comes.
    let mut client = server.client();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    client.socket.write_all(head.as_bytes()).unwrap();
    for _ in 0..4 {
        client.socket.write_all(format!("{:x}\r\n", block.len()).as_bytes()).unwrap();
        client.socket.write_all(&block).unwrap();
        client.socket.write_all(b"\r\n").unwrap();
    }
    client.socket.write_all(b"0\r\n\r\n").unwrap();
    assert_eq!(client.reply().status, 413);

    // A refusal before the body was read leaves the connection in step.
    let mut client = server.client();
    client.send("POST", "/nothing", &[("content-type", "application/json")], &vec![b' '; 100_000]);
    assert_eq!(client.reply().status, 404);
    assert_eq!(client.get("/health").status, 200);
}

#[test]
fn headers_are_limited() {
    let server = TestServer::start();
    let mut client = server.client();
    let long = "x".repeat(30 << 10);
    client.send("GET", "/health", &[("a", &long), ("b", &long)], b"");
    assert_eq!(client.reply().status, 200);
    client.send("GET", "/health", &[("a", &long), ("b", &long), ("c", &long)], b"");
    let reply = client.reply();
    assert_eq!((reply.status, reply.header("connection")), (431, Some("close")));
    assert!(reply.json()["error"]["message"].is_string());
    let mut client = server.client();
    client.send("GET", "/health", &[("a", &"x".repeat(200 << 10))], b"");
    assert_eq!(client.head().0, 431);
}

#[test]
fn a_client_that_sends_nothing_is_let_go() {
    let mut setup = Setup::default();
    setup.server.io_timeout = Duration::from_millis(300);
    let server = TestServer::with(setup);
    let mut slow_header = server.client();
    slow_header.socket.write_all(b"GET /health HTTP/1.1\r\nhost:").unwrap();
    let mut slow_body = server.client();
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{";
    slow_body.socket.write_all(head.as_bytes()).unwrap();
    assert_eq!(slow_body.reply().status, 408);
    assert!(slow_header.is_closed());
}
