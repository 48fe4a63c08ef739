//! The store of a tower-herd fleet on Redis or Valkey.
//!
//! ```text
//! ACL SETUSER herd on >PASSWORD ~herd:v1:* &herd:v1:* +eval +evalsha +eval_ro +evalsha_ro +hget +hmget +hset +hgetall +hdel +del +time +info +hello +publish +spublish +subscribe +ssubscribe +cluster|slots
//! ACL SETUSER look on >PASSWORD ~herd:v1:* +eval +evalsha +eval_ro +evalsha_ro +hget +hgetall +time +hello
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
pub use status::{Member, Open, Pause, Probe, Rate, Scope, Status};
pub use store::RedisStore;
pub use token::RedisTokens;
