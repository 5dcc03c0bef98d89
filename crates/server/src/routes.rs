//! Which path leads where, and what every request passes on its way: header limit, CORS, API key, request
//! id, counting. Decides no field of any request.

use crate::body::discard;
use crate::error::{ApiError, with_allow};
use crate::format::unique_id;
use crate::state::ServerState;
use crate::{generate, info, tokens};
use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{HeaderName, RETRY_AFTER};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Every route and the methods it allows.
pub(crate) const ROUTES: [(&str, &str); 10] = [
    ("/v1/chat/completions", "POST, OPTIONS"),
    ("/v1/completions", "POST, OPTIONS"),
    ("/v1/models", "GET, HEAD, OPTIONS"),
    ("/v1/models/{*id}", "GET, HEAD, OPTIONS"),
    ("/tokenize", "POST, OPTIONS"),
    ("/detokenize", "POST, OPTIONS"),
    ("/health", "GET, HEAD, OPTIONS"),
    ("/metrics", "GET, HEAD, OPTIONS"),
    ("/version", "GET, HEAD, OPTIONS"),
    ("/openapi.json", "GET, HEAD, OPTIONS"),
];

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// A client's request id is echoed up to this many bytes.
const MAX_REQUEST_ID_BYTES: usize = 256;
/// Browsers may remember a preflight for this long.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);

/// The whole service.
pub(crate) fn router(state: Arc<ServerState>) -> Router {
    let cors = cors(&state.config.cors_origins);
    let router = Router::new()
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::completions))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*id}", get(info::model))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/health", get(info::health))
        .route("/metrics", get(info::metrics))
        .route("/version", get(info::version))
        .route("/openapi.json", get(info::openapi))
        .fallback(no_such_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Arc::clone(&state))
        .layer(from_fn_with_state(state, gate));
    match cors {
        Some(layer) => router.layer(layer),
        None => router,
    }
}

/// CORS headers for the configured origins; `None` switches them off. Preflights are answered before the key
/// is asked for (D59).
fn cors(origins: &[String]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let allowed = if origins.iter().any(|o| o == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|o| HeaderValue::from_str(o.trim_end_matches('/')).ok()))
    };
    Some(
        CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods([Method::GET, Method::HEAD, Method::POST, Method::OPTIONS])
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers([REQUEST_ID, RETRY_AFTER])
            .max_age(PREFLIGHT_AGE),
    )
}

/// What every request passes.
async fn gate(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let arrival = Instant::now();
    let request_id = request
        .headers()
        .get(REQUEST_ID)
        .filter(|id| !id.is_empty() && id.len() <= MAX_REQUEST_ID_BYTES)
        .cloned()
        .or_else(|| HeaderValue::try_from(unique_id("req-")).ok());
    let route = request.extensions().get::<MatchedPath>().and_then(|path| route(path.as_str()));
    let method = request.method().clone();
    let mut response = match admit(&state, &request) {
        Err(error) => {
            discard(request);
            error.into_response()
        }
        Ok(()) => match route {
            Some((_, methods)) if request.method() == Method::OPTIONS => {
                with_allow(StatusCode::NO_CONTENT.into_response(), methods)
            }
            _ => next.run(request).await,
        },
    };
    let (path, status) = (route.map_or("other", |(path, _)| path), response.status().as_u16());
    state.metrics.count_http(path, status);
    // Nothing that a client wrote goes to the log, and for streams this is the time to the headers.
    tracing::debug!(%method, path, status, elapsed_us = arrival.elapsed().as_micros(), "answered");
    if let Some(id) = request_id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

fn admit(state: &ServerState, request: &Request) -> Result<(), ApiError> {
    let uri = request.uri();
    let limit = state.limits().header_bytes;
    // Each header travels with a colon, a space and a line break.
    let fields: usize = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    let target = uri.path_and_query().map_or(0, |target| target.as_str().len());
    if fields + target > limit {
        return Err(ApiError::headers_too_large(limit));
    }
    state.keys.check(request.method(), uri.path(), request.headers())
}

fn route(path: &str) -> Option<(&'static str, &'static str)> {
    ROUTES.iter().find(|(known, _)| *known == path).copied()
}

async fn no_such_route(request: Request<Body>) -> Response {
    let error = ApiError::no_such_route(request.method().as_str(), crate::error::clip(request.uri().path(), 256));
    discard(request);
    error.into_response()
}

async fn wrong_method(path: MatchedPath, request: Request<Body>) -> Response {
    let error = ApiError::method_not_allowed(request.method().as_str(), crate::error::clip(request.uri().path(), 256));
    discard(request);
    match route(path.as_str()) {
        Some((_, methods)) => with_allow(error.into_response(), methods),
        None => error.into_response(),
    }
}
