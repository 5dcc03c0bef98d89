//! The one place where a failure becomes an HTTP answer: status, OpenAI error object, headers.
//! Knows no endpoint.

use crate::config::MAX_ERROR_BYTES;
use axum::http::header::{ALLOW, CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use pagemill_engine::SubmitError;
use serde::Serialize;

/// A failure as the client sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after_s: Option<u32>,
    close: bool,
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: ErrorObject<'a>,
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None, retry_after_s: None, close: false }
    }

    /// 400: the caller's fault.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400 that names a field.
    pub(crate) fn bad_field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::bad_request(message).with_param(param)
    }

    /// 400: a field of the OpenAI API that this server does not support.
    pub(crate) fn unsupported(param: &str) -> Self {
        Self::bad_field(param, format!("'{param}' is not supported by this server.")).with_code("unsupported_parameter")
    }

    /// 400: the prompt leaves no room in the context.
    pub(crate) fn context_length(message: impl Into<String>, param: &str) -> Self {
        Self::bad_field(param, message).with_code("context_length_exceeded")
    }

    /// 401.
    pub(crate) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message).with_code("invalid_api_key")
    }

    /// 404 for a path.
    pub(crate) fn no_such_route(method: &str, path: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", format!("Unknown request URL: {method} {path}."))
            .with_code("unknown_url")
    }

    /// 404 for a model.
    pub(crate) fn model_not_found(name: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", format!("The model '{name}' does not exist."))
            .with_param("model")
            .with_code("model_not_found")
    }

    /// 405.
    pub(crate) fn method_not_allowed(method: &str, path: &str) -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "invalid_request_error",
            format!("Not allowed to {method} on {path}."),
        )
        .with_code("method_not_allowed")
    }

    /// 408: the body stopped arriving.
    pub(crate) fn request_timeout() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "The request body stopped arriving.").closing()
    }

    /// 413.
    pub(crate) fn body_too_large(limit: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "invalid_request_error",
            format!("The request body exceeds {limit} bytes."),
        )
        .closing()
    }

    /// 415.
    pub(crate) fn unsupported_media_type(found: &str) -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            format!("The Content-Type '{found}' is not supported; send application/json."),
        )
    }

    /// 431.
    pub(crate) fn headers_too_large(limit: usize) -> Self {
        Self::new(
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            "invalid_request_error",
            format!("Request line and headers exceed {limit} bytes."),
        )
        .closing()
    }

    /// 429 with `Retry-After`.
    pub(crate) fn too_many_requests(message: impl Into<String>) -> Self {
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        error.retry_after_s = Some(1);
        error.with_code("rate_limit_exceeded")
    }

    /// 500.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// The engine has stopped for good; its own words follow. 503.
    pub(crate) fn engine_stopped(message: &str) -> Self {
        Self::unavailable(capitalised(message), "engine_stopped")
    }

    /// 503; `code` says why.
    pub(crate) fn unavailable(message: impl Into<String>, code: &'static str) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        error.retry_after_s = Some(5);
        error.with_code(code)
    }

    /// 503 while the server drains; the connection is of no further use.
    pub(crate) fn draining() -> Self {
        Self::unavailable("The server is shutting down.", "shutting_down").closing()
    }

    pub(crate) fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    pub(crate) fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    fn closing(mut self) -> Self {
        self.close = true;
        self
    }

    #[cfg(test)]
    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    #[cfg(test)]
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    #[cfg(test)]
    pub(crate) fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    /// The `{"error": …}` object, for answers and for events inside a stream.
    pub(crate) fn to_json(&self) -> String {
        let body = ErrorBody {
            error: ErrorObject {
                message: clip(&self.message, MAX_ERROR_BYTES),
                kind: self.kind,
                param: self.param.as_deref().map(|p| clip(p, 256)),
                code: self.code,
            },
        };
        // Strings and nulls always serialise; the fallback keeps this total.
        serde_json::to_string(&body).unwrap_or_else(|_| {
            r#"{"error":{"message":"internal error","type":"server_error","param":null,"code":null}}"#.to_owned()
        })
    }
}

/// The longest prefix of `text` of at most `max_bytes` bytes that ends between characters.
pub(crate) fn clip(text: &str, max_bytes: usize) -> &str {
    &text[..text.floor_char_boundary(max_bytes)]
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.to_json()).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.close {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// An `Allow` header for answers to wrong methods and to `OPTIONS`.
pub(crate) fn with_allow(mut response: Response, methods: &'static str) -> Response {
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(methods));
    response
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        use pagemill_engine::Refusal;
        let message = error.to_string();
        match error {
            SubmitError::Refused(Refusal::QueueFull { .. }) => {
                Self::too_many_requests(format!("Too many requests: {message}. Try again later."))
            }
            SubmitError::Refused(Refusal::TooLong { .. }) => Self::context_length(capitalised(&message), "max_tokens"),
            SubmitError::Refused(Refusal::NeverFits { .. }) => {
                Self::context_length(format!("This request can never run: {message}."), "max_tokens")
            }
            SubmitError::Refused(Refusal::TooManyChoices { .. }) => Self::bad_field("n", capitalised(&message)),
            SubmitError::Refused(Refusal::EmptyPrompt) => Self::bad_field("prompt", capitalised(&message)),
            SubmitError::Draining => Self::draining(),
            SubmitError::Stopped(_) => Self::engine_stopped(&message),
        }
    }
}

fn capitalised(message: &str) -> String {
    let mut chars = message.chars();
    match chars.next() {
        Some(first) => format!("{}{}.", first.to_uppercase(), chars.as_str()),
        None => String::new(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn error_text_is_cut_between_characters() {
        let error = ApiError::bad_request("é".repeat(MAX_ERROR_BYTES));
        let value: serde_json::Value = serde_json::from_str(&error.to_json()).unwrap();
        let message = value["error"]["message"].as_str().unwrap();
        assert_eq!(message.len(), MAX_ERROR_BYTES);
        assert!(message.chars().all(|c| c == 'é'));
    }

    #[test]
    fn all_four_keys_are_always_there() {
        let value: serde_json::Value = serde_json::from_str(&ApiError::internal("x").to_json()).unwrap();
        let mut keys: Vec<_> = value["error"].as_object().unwrap().keys().cloned().collect();
        keys.sort();
        assert_eq!(keys, ["code", "message", "param", "type"]);
        assert!(value["error"]["param"].is_null());
    }
}
