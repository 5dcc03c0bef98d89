//! Values written as Python writes them, for templates that were made for Jinja2.
//!
//! It decides how a template's values become text: `str()` and `repr()` for output, `json.dumps` for `tojson`. It
//! does not know templates.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The deepest nesting that is written.
const DEPTH_MAX: usize = 128;

/// `str(value)`.
pub(super) fn write_str(out: &mut impl Write, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text).map_err(Error::from),
        None if value.is_undefined() => Ok(()),
        None => write_repr(out, value, 0),
    }
}

fn write_repr(out: &mut impl Write, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "value is nested too deeply to be written"));
    }
    match value.kind() {
        ValueKind::None => out.write_str("None")?,
        ValueKind::Undefined => out.write_str("Undefined")?,
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" })?,
        ValueKind::Number => write_number(out, value)?,
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default())?,
        ValueKind::Seq => {
            let is_tuple = value.is_tuple();
            out.write_char(if is_tuple { '(' } else { '[' })?;
            let len = write_items(out, value, depth)?;
            out.write_str(match (is_tuple, len) {
                (true, 1) => ",)",
                (true, _) => ")",
                _ => "]",
            })?;
        }
        ValueKind::Map => {
            out.write_char('{')?;
            for (index, key) in value.try_iter()?.enumerate() {
                out.write_str(if index == 0 { "" } else { ", " })?;
                write_repr(out, &key, depth + 1)?;
                out.write_str(": ")?;
                write_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.write_char('}')?;
        }
        _ => write!(out, "{value}")?,
    }
    Ok(())
}

fn write_items(out: &mut impl Write, value: &Value, depth: usize) -> Result<usize, Error> {
    let mut len = 0;
    for item in value.try_iter()? {
        out.write_str(if len == 0 { "" } else { ", " })?;
        write_repr(out, &item, depth + 1)?;
        len += 1;
    }
    Ok(len)
}

fn write_number(out: &mut impl Write, value: &Value) -> Result<(), Error> {
    if value.is_integer() {
        return write!(out, "{value}").map_err(Error::from);
    }
    out.write_str(&float(f64::try_from(value.clone())?)).map_err(Error::from)
}

/// `repr(float)`: shortest digits; an exponent from 1e16 up and below 1e-4, of at least two digits.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{number:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{number}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

fn write_quoted(out: &mut impl Write, text: &str) -> Result<(), Error> {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if c < ' ' || ('\u{7f}'..='\u{a0}').contains(&c) || c == '\u{ad}' => write!(out, "\\x{:02x}", c as u32)?,
            c => out.write_char(c)?,
        }
    }
    out.write_char(quote)?;
    Ok(())
}

/// How `json.dumps` lays out what it writes.
#[derive(Clone, Debug)]
pub(super) struct JsonLayout {
    /// What one level of indentation is; `None` writes one line.
    pub indent: Option<String>,
    /// Between items.
    pub item_separator: String,
    /// Between a key and its value.
    pub key_separator: String,
    /// Whether characters beyond ASCII are escaped.
    pub ensure_ascii: bool,
    /// Whether keys are sorted.
    pub sort_keys: bool,
}

/// `json.dumps(value)`.
pub(super) fn to_json(value: &Value, layout: &JsonLayout) -> Result<String, Error> {
    let mut out = String::new();
    write_json(&mut out, value, layout, 0)?;
    Ok(out)
}

fn write_json(out: &mut String, value: &Value, layout: &JsonLayout, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "value is nested too deeply for tojson"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(number) if !number.is_finite() => out.push_str(match number {
                n if n.is_nan() => "NaN",
                n if n > 0.0 => "Infinity",
                _ => "-Infinity",
            }),
            _ => write_number(out, value)?,
        },
        ValueKind::String => write_json_string(out, value.as_str().unwrap_or_default(), layout.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_json_block(out, layout, depth, ['[', ']'], &items, |out, item| {
                write_json(out, item, layout, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if layout.sort_keys {
                keys.sort();
            }
            write_json_block(out, layout, depth, ['{', '}'], &keys, |out, key| {
                match key.as_str() {
                    Some(text) => write_json_string(out, text, layout.ensure_ascii),
                    None => {
                        out.push('"');
                        write_json(out, key, layout, depth + 1)?;
                        out.push('"');
                    }
                }
                out.push_str(&layout.key_separator);
                write_json(out, &value.get_item(key)?, layout, depth + 1)
            })?;
        }
        kind => {
            let detail = format!("Object of type {kind} is not JSON serializable");
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
    }
    Ok(())
}

fn write_json_block(
    out: &mut String,
    layout: &JsonLayout,
    depth: usize,
    [open, close]: [char; 2],
    items: &[Value],
    mut write: impl FnMut(&mut String, &Value) -> Result<(), Error>,
) -> Result<(), Error> {
    let break_line = |out: &mut String, depth: usize| {
        if let Some(indent) = &layout.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    };
    out.push(open);
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push_str(&layout.item_separator);
        }
        break_line(out, depth + 1);
        write(out, item)?;
    }
    if !items.is_empty() {
        break_line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn write_json_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ensure_ascii && !c.is_ascii()) => {
                let mut units = [0_u16; 2];
                for unit in c.encode_utf16(&mut units) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn floats_like_python() {
        for (number, expected) in [
            (21.5, "21.5"),
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (1e-5, "1e-05"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.1 + 0.2, "0.30000000000000004"),
        ] {
            assert_eq!(float(number), expected);
        }
    }

    #[test]
    fn values_like_python() {
        let value = Value::from_pairs([
            ("it's".to_owned(), Value::from(vec![Value::from(()), Value::from(true), Value::from(1.0)])),
            ("q\"'\n\u{1}".to_owned(), Value::from("é")),
        ]);
        let mut text = String::new();
        write_str(&mut text, &value).unwrap();
        assert_eq!(text, r#"{"it's": [None, True, 1.0], 'q"\'\n\x01': 'é'}"#);
    }
}
