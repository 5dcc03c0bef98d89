//! `content` of a chat message: a string, or a list of typed parts.

use serde::de::{Error, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;

/// A message's content.
#[derive(Debug)]
pub(crate) enum Content {
    /// Plain text.
    Text(String),
    /// Parts, as sent.
    Parts(Vec<Part>),
}

/// One part. Only text can be served; the other kinds are known so that they can be refused by name.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Part {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) text: Option<String>,
    #[serde(rename = "refusal")]
    pub(crate) _refusal: Option<IgnoredAny>,
    #[serde(rename = "image_url")]
    pub(crate) _image_url: Option<IgnoredAny>,
    #[serde(rename = "input_audio")]
    pub(crate) _input_audio: Option<IgnoredAny>,
    #[serde(rename = "file")]
    pub(crate) _file: Option<IgnoredAny>,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of content parts")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<Content, E> {
                Ok(Content::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Content, A::Error> {
                let mut parts = Vec::new();
                while let Some(part) = seq.next_element()? {
                    parts.push(part);
                }
                Ok(Content::Parts(parts))
            }
        }
        deserializer.deserialize_any(Shape)
    }
}
