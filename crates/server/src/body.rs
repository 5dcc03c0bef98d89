//! From bytes on the wire to a typed request: length, content type, nesting and JSON are checked here,
//! before any value is built. Knows no field's meaning.

use crate::config::Limits;
use crate::error::{ApiError, clip};
use axum::body::Body;
use axum::body::HttpBody;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT};
use axum::http::{HeaderMap, Request};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use std::time::Duration;
use tokio::time::timeout;

/// Bodies above this many bytes are parsed off the event loop.
const PARSE_INLINE_BYTES: usize = 64 << 10;
/// After an early refusal the rest of the body is read and thrown away for this long, so that the answer
/// reaches a client that only reads once it has sent everything.
const LINGER: Duration = Duration::from_secs(10);

/// Reads and parses a JSON body.
///
/// # Errors
/// 400 (empty, malformed, too deep, unknown or wrong field), 408, 413, 415.
pub(crate) async fn read_json<T: DeserializeOwned + Send + 'static>(
    request: Request<Body>,
    limits: &Limits,
    io_timeout: Duration,
) -> Result<T, ApiError> {
    let (parts, body) = request.into_parts();
    let bytes = read_body(&parts.headers, body, limits.body_bytes, io_timeout).await?;
    check_content_type(&parts.headers)?;
    let max_depth = limits.json_depth;
    if bytes.len() <= PARSE_INLINE_BYTES {
        return parse(&bytes, max_depth);
    }
    tokio::task::spawn_blocking(move || parse(&bytes, max_depth))
        .await
        .unwrap_or_else(|_| Err(ApiError::internal("Parsing the request failed.")))
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(CONTENT_TYPE) else {
        return Err(ApiError::bad_request("The Content-Type header is missing; send application/json."));
    };
    let text = value.to_str().unwrap_or("(not ASCII)");
    let essence = text.split(';').next().unwrap_or_default().trim();
    let is_json = essence.eq_ignore_ascii_case("application/json")
        || (essence.len() > 5 && essence.as_bytes()[essence.len() - 5..].eq_ignore_ascii_case(b"+json"));
    if is_json { Ok(()) } else { Err(ApiError::unsupported_media_type(clip(text, 128))) }
}

async fn read_body(
    headers: &HeaderMap,
    mut body: Body,
    max_bytes: usize,
    io_timeout: Duration,
) -> Result<Bytes, ApiError> {
    let announced = headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok()).and_then(|v| v.parse::<u64>().ok());
    if announced.is_some_and(|n| n > max_bytes as u64) {
        // A client that waits for `100 Continue` has sent nothing yet: nothing to throw away.
        if !headers.contains_key(EXPECT) {
            linger(body);
        }
        return Err(ApiError::body_too_large(max_bytes));
    }
    let mut buffer = BytesMut::new();
    loop {
        let frame = match timeout(io_timeout, body.frame()).await {
            Err(_) => return Err(ApiError::request_timeout()),
            Ok(None) => return Ok(buffer.freeze()),
            Ok(Some(Err(_))) => return Err(ApiError::bad_request("The request body could not be read.")),
            Ok(Some(Ok(frame))) => frame,
        };
        let Ok(data) = frame.into_data() else { continue };
        if buffer.len() + data.len() > max_bytes {
            linger(body);
            return Err(ApiError::body_too_large(max_bytes));
        }
        buffer.extend_from_slice(&data);
    }
}

/// Throws a refused request's body away, in the background, so that the connection stays in step (D76).
pub(crate) fn discard(request: Request<Body>) {
    let (parts, body) = request.into_parts();
    if !body.is_end_stream() && !parts.headers.contains_key(EXPECT) {
        linger(body);
    }
}

/// Reads the rest of a refused body into nothing, in the background, for a bounded time.
fn linger(mut body: Body) {
    tokio::spawn(timeout(LINGER, async move { while let Some(Ok(_)) = body.frame().await {} }));
}

/// Parses a body that has been read.
///
/// # Errors
/// 400, naming the field where there is one.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8], max_depth: usize) -> Result<T, ApiError> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(ApiError::bad_request("The request body is empty; send a JSON object."));
    }
    if exceeds_depth(bytes, max_depth) {
        return Err(ApiError::bad_request(format!("The JSON body is nested deeper than {max_depth} levels.")));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        describe(error.inner(), &path)
    })?;
    deserializer.end().map_err(|error| describe(&error, "."))?;
    Ok(value)
}

/// Whether arrays and objects are nested deeper than `max_depth`. One pass, constant memory, no recursion;
/// the text need not be valid JSON.
fn exceeds_depth(bytes: &[u8], max_depth: usize) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for &byte in bytes {
        if in_string {
            if escaped {
                escaped = false;
            } else if byte == b'\\' {
                escaped = true;
            } else if byte == b'"' {
                in_string = false;
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => {
                depth += 1;
                if depth > max_depth {
                    return true;
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

fn describe(error: &serde_json::Error, path: &str) -> ApiError {
    let text = error.to_string();
    if error.is_syntax() || error.is_eof() || error.is_io() {
        return ApiError::bad_request(format!("The request body is not valid JSON: {text}."));
    }
    if let Some(name) = text.strip_prefix("unknown field `").and_then(|rest| rest.split("`, expected").next()) {
        let name = clip(name, 128);
        return ApiError::bad_field(name, format!("Unrecognized request argument supplied: {name}."))
            .with_code("unknown_parameter");
    }
    if let Some(name) = text.strip_prefix("missing field `").and_then(|rest| rest.split('`').next()) {
        let param = if path == "." { name.to_owned() } else { format!("{path}.{name}") };
        return ApiError::bad_field(&param, format!("Missing required parameter: '{param}'."))
            .with_code("missing_required_parameter");
    }
    if path == "." {
        return ApiError::bad_request(format!("Invalid request body: {text}."));
    }
    let path = clip(path, 256);
    ApiError::bad_field(path, format!("Invalid value for '{path}': {text}.")).with_code("invalid_value")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Probe {
        a: i64,
        inner: Option<Vec<Inner>>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Inner {
        x: String,
    }

    fn refusal(text: &str) -> ApiError {
        parse::<Probe>(text.as_bytes(), 64).unwrap_err()
    }

    #[test]
    fn d35_depth_is_found_without_recursion() {
        let deep = format!("{{\"a\":1,\"x\":{}1{}}}", "[".repeat(10_000), "]".repeat(10_000));
        assert!(refusal(&deep).message().contains("deeper than 64"));
        let objects = "{\"a\":".repeat(100_000);
        assert!(refusal(&objects).message().contains("deeper than 64"));
        let inside_string = format!("{{\"a\":1,\"x\":\"\\\"{}\"}}", "[".repeat(10_000));
        assert!(!exceeds_depth(inside_string.as_bytes(), 64));
        assert!(!exceeds_depth("[".repeat(64).as_bytes(), 64));
        assert!(exceeds_depth("[".repeat(65).as_bytes(), 64));
    }

    #[test]
    fn the_field_is_named() {
        assert_eq!(refusal(r#"{"a":1,"zz":[1]}"#).param(), Some("zz"));
        assert_eq!(refusal(r#"{"a":1.5}"#).param(), Some("a"));
        assert_eq!(refusal(r#"{"a":1,"inner":[{"x":1}]}"#).param(), Some("inner[0].x"));
        assert_eq!(refusal(r#"{"a":1,"inner":[{}]}"#).param(), Some("inner[0].x"));
        assert_eq!(refusal("{}").param(), Some("a"));
    }

    #[test]
    fn d60_malformed_bodies_are_400() {
        for text in ["", "  ", "{", "not json", "{\"a\":1}x", "[]", "null", r#"{"a":1,"a":2}"#, r#"{"a":"\ud800"}"#] {
            assert_eq!(refusal(text).status(), 400, "{text}");
        }
        assert_eq!(parse::<Probe>(b"{\"a\":1,\"\xff\":2}", 64).unwrap_err().status(), 400);
    }

    #[test]
    fn d35_unknown_names_are_cut_in_the_answer() {
        let text = format!("{{\"a\":1,\"{}\":2}}", "k".repeat(1 << 20));
        assert!(refusal(&text).to_json().len() < 1024);
    }
}
