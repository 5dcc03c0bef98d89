//! Ranks.
