//! The server as clients meet it: a real listener on a real port, the whole stack below it down to a zoo
//! model's weights, and clients that speak bytes. Tests that meet an entry of the list of known faults carry
//! its number.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod answers;
mod lifecycle;
mod refusals;
mod streams;
mod support;
mod tokens;
mod transport;
