//! The snippets of the README as documentation tests: what it shows compiles.
#![forbid(unsafe_code)]
#![doc = include_str!("../../../README.md")]
