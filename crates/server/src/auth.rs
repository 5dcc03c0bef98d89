//! Who may call. Keys are compared by hash and in constant time, so that neither a key's length nor its
//! first wrong byte shows in the time an answer takes.

use crate::error::ApiError;
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, Method};
use subtle::{Choice, ConstantTimeEq};

/// Paths that are open without a key: probes and scrapers carry none.
const OPEN_PATHS: [&str; 3] = ["/health", "/version", "/metrics"];

/// The accepted keys, as hashes.
#[derive(Debug, Clone)]
pub(crate) struct ApiKeys {
    hashes: Vec<blake3::Hash>,
}

impl ApiKeys {
    pub(crate) fn new(keys: &[String]) -> Self {
        Self { hashes: keys.iter().map(|key| blake3::hash(key.as_bytes())).collect() }
    }

    /// Lets a request pass or says why not. `OPTIONS` passes: browsers ask without a key (D59).
    ///
    /// # Errors
    /// 401.
    pub(crate) fn check(&self, method: &Method, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.hashes.is_empty() || method == Method::OPTIONS || OPEN_PATHS.contains(&path) {
            return Ok(());
        }
        let Some(value) = headers.get(AUTHORIZATION) else {
            return Err(ApiError::unauthorized("You didn't provide an API key: send 'Authorization: Bearer KEY'."));
        };
        let bytes = value.as_bytes();
        let key = match bytes.split_at_checked(7) {
            Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"bearer ") => key.trim_ascii(),
            _ => return Err(ApiError::unauthorized("The Authorization header must be 'Bearer KEY'.")),
        };
        let hash = blake3::hash(key);
        let matches = self
            .hashes
            .iter()
            .fold(Choice::from(0), |found, accepted| found | accepted.as_bytes().ct_eq(hash.as_bytes()));
        if bool::from(matches) { Ok(()) } else { Err(ApiError::unauthorized("Incorrect API key provided.")) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn status(keys: &[&str], method: Method, path: &str, authorization: Option<&str>) -> u16 {
        let keys = ApiKeys::new(&keys.iter().map(|k| (*k).to_owned()).collect::<Vec<_>>());
        let mut headers = HeaderMap::new();
        if let Some(value) = authorization {
            headers.insert(AUTHORIZATION, value.parse().unwrap());
        }
        keys.check(&method, path, &headers).map_or_else(|e| e.status().as_u16(), |()| 200)
    }

    #[test]
    fn keys_are_checked() {
        let path = "/v1/models";
        assert_eq!(status(&[], Method::GET, path, None), 200);
        for (sent, want) in [
            (None, 401),
            (Some("Bearer a"), 200),
            (Some("bearer b"), 200),
            (Some("Bearer ab"), 401),
            (Some("Bearer "), 401),
            (Some("Basic a"), 401),
            (Some("a"), 401),
        ] {
            assert_eq!(status(&["a", "b"], Method::POST, path, sent), want, "{sent:?}");
        }
        assert_eq!(status(&["a"], Method::OPTIONS, path, None), 200);
        assert_eq!(status(&["a"], Method::GET, "/health", None), 200);
        assert_eq!(status(&["a"], Method::GET, "/healthz", None), 401);
    }
}
