//! The store of a tower-herd fleet on Redis or Valkey.
//!
//! ```text
//! ACL SETUSER herd on >PASSWORD ~herd:v1:* &herd:v1:* +eval +evalsha +eval_ro +evalsha_ro +hget +hset +hgetall +hdel +del +time +info +hello +publish +spublish +subscribe +ssubscribe +cluster|slots
//! ```
#![forbid(unsafe_code)]

mod config;
mod error;
mod key;
mod link;
mod listen;
mod nodes;
mod status;
mod store;
mod token;

pub use config::{ConfigError, RedisConfig};
pub use status::Status;
pub use store::RedisStore;
pub use token::RedisTokens;
