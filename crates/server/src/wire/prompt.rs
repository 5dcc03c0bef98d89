//! Fields with several shapes: `stop` (a string or a list) and `prompt` (a string, strings, ids, lists of
//! ids). Read by hand, so that a wrong shape gets a sentence and a long list no more memory than it needs.

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;

/// Token ids in one `prompt` field, over all its lists; no context is as long.
const MAX_PROMPT_IDS: usize = 1 << 22;

/// A string or a list of strings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StringOrList(pub(crate) Vec<String>);

impl<'de> Deserialize<'de> for StringOrList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = StringOrList;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(StringOrList(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut strings = Vec::new();
                while let Some(text) = seq.next_element()? {
                    strings.push(text);
                }
                Ok(StringOrList(strings))
            }
        }
        deserializer.deserialize_any(Shape)
    }
}

/// `prompt`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// One string or several.
    Texts(Vec<String>),
    /// One list of ids or several, as sent: range is checked later.
    Ids(Vec<Vec<i64>>),
}

/// One element of a `prompt` list.
enum Item {
    Text(String),
    Id(i64),
    Ids(Vec<i64>),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = Item;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or a list of token ids")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Item, E> {
                Ok(Item::Text(text.to_owned()))
            }

            fn visit_i64<E: Error>(self, id: i64) -> Result<Item, E> {
                Ok(Item::Id(id))
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<Item, E> {
                // Beyond i64 is beyond every vocabulary: validation refuses it by value.
                Ok(Item::Id(i64::try_from(id).unwrap_or(i64::MAX)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Item, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = seq.next_element()? {
                    push_id(&mut ids, id)?;
                }
                Ok(Item::Ids(ids))
            }
        }
        deserializer.deserialize_any(Shape)
    }
}

fn push_id<E: Error>(ids: &mut Vec<i64>, id: i64) -> Result<(), E> {
    if ids.len() == MAX_PROMPT_IDS {
        return Err(E::custom(format_args!("more than {MAX_PROMPT_IDS} token ids")));
    }
    ids.push(id);
    Ok(())
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = Prompt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a list of strings, a list of token ids or a list of lists of token ids")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Texts(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompt, A::Error> {
                match seq.next_element::<Item>()? {
                    None => Ok(Prompt::Texts(Vec::new())),
                    Some(Item::Text(text)) => {
                        let mut texts = vec![text];
                        while let Some(text) = seq.next_element()? {
                            texts.push(text);
                        }
                        Ok(Prompt::Texts(texts))
                    }
                    Some(Item::Id(id)) => {
                        let mut ids = vec![id];
                        while let Some(id) = seq.next_element()? {
                            push_id(&mut ids, id)?;
                        }
                        Ok(Prompt::Ids(vec![ids]))
                    }
                    Some(Item::Ids(ids)) => {
                        let mut num_ids = ids.len();
                        let mut lists = vec![ids];
                        while let Some(ids) = seq.next_element::<Vec<i64>>()? {
                            num_ids += ids.len();
                            if num_ids > MAX_PROMPT_IDS {
                                return Err(A::Error::custom(format_args!("more than {MAX_PROMPT_IDS} token ids")));
                            }
                            lists.push(ids);
                        }
                        Ok(Prompt::Ids(lists))
                    }
                }
            }
        }
        deserializer.deserialize_any(Shape)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Prompt, String> {
        serde_json::from_str(text).map_err(|e| e.to_string())
    }

    #[test]
    fn all_four_shapes_are_read() {
        assert_eq!(read(r#""a""#), Ok(Prompt::Texts(vec!["a".into()])));
        assert_eq!(read(r#"["a","b"]"#), Ok(Prompt::Texts(vec!["a".into(), "b".into()])));
        assert_eq!(read("[1,2]"), Ok(Prompt::Ids(vec![vec![1, 2]])));
        assert_eq!(read("[[1],[2,-3]]"), Ok(Prompt::Ids(vec![vec![1], vec![2, -3]])));
        assert_eq!(read("[[]]"), Ok(Prompt::Ids(vec![vec![]])));
        assert_eq!(read("[18446744073709551615]"), Ok(Prompt::Ids(vec![vec![i64::MAX]])));
    }

    #[test]
    fn mixed_shapes_are_refused() {
        for text in [r#"["a",1]"#, r#"[1,"a"]"#, "[[1],2]", "[1.5]", "{}", "true", "[[[1]]]", "[null]"] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
