//! The OpenAPI document: kept by hand beside this file, checked here against routes and request structs.

/// The document.
pub(crate) const DOCUMENT: &str = include_str!("openapi.json");

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::DOCUMENT;
    use crate::routes::ROUTES;
    use crate::wire::StreamOptions;
    use crate::wire::chat::{ChatRequest, Message};
    use crate::wire::completion::CompletionRequest;
    use crate::wire::content::Part;
    use crate::wire::tokens::{DetokenizeRequest, TokenizeRequest};
    use serde::de::DeserializeOwned;
    use serde_json::Value;
    use std::collections::BTreeSet;

    fn document() -> Value {
        serde_json::from_str(DOCUMENT).unwrap()
    }

    /// The field names of a struct, from what serde says it expected.
    fn fields_of<T: DeserializeOwned>() -> BTreeSet<String> {
        let Err(error) = serde_json::from_str::<T>(r#"{"":0}"#) else { panic!("an unknown field was accepted") };
        let text = error.to_string();
        let expected = text.split("expected ").nth(1).unwrap_or_else(|| panic!("{text}"));
        expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    fn documented(schema: &str) -> BTreeSet<String> {
        let document = document();
        let schema = &document["components"]["schemas"][schema];
        assert_eq!(schema["additionalProperties"], false);
        schema["properties"].as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn request_schemas_are_the_structs() {
        assert_eq!(documented("ChatRequest"), fields_of::<ChatRequest>());
        assert_eq!(documented("CompletionRequest"), fields_of::<CompletionRequest>());
        assert_eq!(documented("StreamOptions"), fields_of::<StreamOptions>());
        assert_eq!(documented("Message"), fields_of::<Message>());
        assert_eq!(documented("ContentPart"), fields_of::<Part>());
        assert_eq!(documented("TokenizeRequest"), fields_of::<TokenizeRequest>());
        assert_eq!(documented("DetokenizeRequest"), fields_of::<DetokenizeRequest>());
    }

    #[test]
    fn paths_and_methods_are_the_routes() {
        let document = document();
        let mut documented: Vec<(String, String)> = Vec::new();
        for (path, operations) in document["paths"].as_object().unwrap() {
            for method in operations.as_object().unwrap().keys() {
                documented.push((path.clone(), method.to_uppercase()));
            }
        }
        let mut routed: Vec<(String, String)> = ROUTES
            .iter()
            .map(|(path, methods)| (path.replace("{*id}", "{id}"), methods.split(',').next().unwrap().to_owned()))
            .collect();
        documented.sort();
        routed.sort();
        assert_eq!(documented, routed);
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn check(value: &Value, root: &Value) {
            match value {
                Value::Object(fields) => {
                    if let Some(target) = fields.get("$ref").and_then(Value::as_str) {
                        assert!(root.pointer(target.trim_start_matches('#')).is_some(), "{target}");
                    }
                    fields.values().for_each(|v| check(v, root));
                }
                Value::Array(items) => items.iter().for_each(|v| check(v, root)),
                _ => {}
            }
        }
        let document = document();
        check(&document, &document);
        assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    }
}
