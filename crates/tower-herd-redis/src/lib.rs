//! Where the processes of a [tower-herd](tower_herd) fleet meet, on Redis or Valkey: one ceiling, one pause, one
//! breaker for all of them ([`RedisStore`]); and retry tokens ([`RedisTokens`]).
//!
//! ```no_run
//! use tower_herd::{Fleet, ProviderSettings, store::FleetSettings};
//! use tower_herd_redis::{RedisConfig, RedisStore};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = RedisConfig::single("redis://redis.internal/")?.credentials(Some("herd"), "password");
//! let fleet = Fleet::shared(RedisStore::new(config)?, FleetSettings::new().label("web-1"))?;
//! let llm = fleet.configure("llm", ProviderSettings::new().ceiling(20))?;
//! // Layers take `llm` as they take any provider.
//! # drop(llm);
//! # Ok(())
//! # }
//! ```
//!
//! `cargo run -p tower-herd-redis --example status -- --redis URL llm` prints what the store knows, with
//! [`RedisStore::peek`].
//!
//! # How it works
//!
//! All that is known of a provider is one hash, `herd:v1:{<provider>}`, changed by one script in one round trip, about once a
//! second and process. One key, so that lost data is always seen to be lost, and in a cluster all lies in one slot. It has no
//! expiry, and is never deleted: a new book gives nobody more for 10 s. (Braces and `%` in names are escaped.)
//!
//! Wake-ups come over a second connection, on the channel `herd:v1:{<provider>}:w`. They are a convenience: without
//! them a pause is known everywhere within a renewal, and a free slot is found by polling.
//!
//! - An exchange ends within [`RedisConfig::response_timeout`] (500 ms), whatever the server does. Connections
//!   are made beside it, and are not waited for any longer.
//! - A report that timed out is not sent again; the next one has a higher number, and if the old one runs late it changes
//!   nothing.
//! - A connection that breaks, or does not answer in time, or leads to a server that is no primary any more, is replaced:
//!   at once, then after waits that double from 50 ms to 2 s, less a random part of up to a half.
//! - What the server says when it refuses is the [source](std::error::Error::source) of the
//!   [`StoreError`](tower_herd::store::StoreError), word for word.
//!
//! | kind | the server |
//! |---|---|
//! | `Unreachable` | no connection, or it broke |
//! | `Timeout` | nothing came in time |
//! | `Unavailable` | `LOADING`, `OOM`, `READONLY`, `MASTERDOWN`, `CLUSTERDOWN`, `TRYAGAIN`, `NOREPLICAS`, `MISCONF`, `BUSY`, too many clients; a slot that moves on and on; a primary that no sentinel knows |
//! | `Denied` | `NOAUTH`, `WRONGPASS`, `NOPERM` |
//! | `Invalid` | anything else: not Redis, something else in the key, a cluster that was taken for a single server |
//!
//! # What each mode needs
//!
//! Redis 6.2 or later, or Valkey, that speaks RESP3 to us (`HELLO 3`: no proxy in between that does not). The tests run on
//! Redis 7.0.15; nothing was run on Valkey or on other versions yet.
//!
//! | mode | needs |
//! |---|---|
//! | single, [`RedisConfig::single`] | `redis://`, or `unix://` for a socket. A name that always leads to the primary will do: a server that turns out to be a replica is left, and the name is looked up again |
//! | sentinels, [`RedisConfig::sentinel`] | the sentinels answer `SENTINEL MASTERS` and `ROLE`, and name addresses that we can reach |
//! | cluster, [`RedisConfig::cluster`] | nodes announce addresses that we can reach. `MOVED` and `ASK` are followed. From 7.0 on wake-ups stay in their shard (`SPUBLISH`); before, they go to all nodes |
//! | TLS, feature `tls` | `rediss://`, rustls; certificates name what we connect to (in a cluster, what its nodes announce). The system's authorities vouch for them, or those of `RedisConfig::tls_authority`. Where the process has set no provider of cryptography for rustls, ours (ring) becomes its default |
//!
//! The rights that are enough for a fleet, and for who only looks (`peek`):
//!
//! ```text
//! ACL SETUSER herd on >PASSWORD ~herd:v1:* &herd:v1:* +eval +evalsha +eval_ro +evalsha_ro +hget +hmget +hset +hgetall +hlen +hdel +del +time +info +hello +publish +spublish +subscribe +ssubscribe +cluster|slots
//! ACL SETUSER look on >PASSWORD ~herd:v1:* +eval +evalsha +eval_ro +evalsha_ro +hget +hgetall +time +hello
//! ```
//!
//! (Redis 6.2 does not know `eval_ro`, `evalsha_ro`, `spublish` and `ssubscribe`. Without `+info` see below; without
//! the channels or the commands for them there are no wake-ups.) All processes of a fleet need the same rights.
//!
//! # What the server should be
//!
//! - **One for this**, or at least not one that evicts: `maxmemory-policy noeviction`. Scripts that write fail at
//!   `maxmemory` under any policy (redis/redis#8623), which is an outage to the fleet; under `allkeys-*` the book
//!   itself may be evicted, which costs a time of learning, and not the ceiling.
//! - **Nothing need be saved.** A restart, with its data or without, is a new life of the book: leases that run go
//!   on, nobody is given more for the ttl, 10 s.
//! - **With replicas**: `min-replicas-to-write 1` and `min-replicas-max-lag 6`, that is below the time for which a lease
//!   is used without a renewal (6.95 s with the default settings). Otherwise an old primary that is cut off goes on
//!   granting beside the new one, and in flight may be up to twice the ceiling until it is found. It must be said what
//!   this costs: without a replica there are no more writes, an outage to the fleet.
//!
//! # What holds, and what does not
//!
//! The [store's table](tower_herd::store#what-holds-and-when-it-does-not) is about any store. On Redis:
//!
//! - **A failover, planned or not, a restart, and a slot that moves to another node** change the run id, by which the
//!   script sees that nobody knows what was lost. The book begins anew: no growth for the ttl, running leases go on,
//!   no overshoot.
//! - **The run id** is read inside the script (`INFO`, which ACLs count among the dangerous commands). Where the
//!   script may not and we may, it is read when a connection is made. Where nobody may it is `none`, with a warning in the log:
//!   then a stale replica that is promoted is noticed only once a process reports a grant that it does not know, and until then
//!   **the ceiling may be exceeded** by what was granted and not replicated.
//! - **The server's clock**: one step is harmless; several, each below the gap (3 s), within one ttl add up.
//! - Redis confirms before its replicas know. `WAIT` is not used: it is refused in scripts, and does not make Redis
//!   consistent. What must not depend on this is for a store on PostgreSQL.
//!
//! # Choices
//!
//! The client is the `redis` crate (1.x), without its connection manager, which keeps a connection that times out,
//! and without its cluster client, which counts redirects and repetitions with one number, so that it follows none or sends
//! again what timed out. A script that the server does not know is sent with `EVAL`, in the same call and to the node of the
//! key, and not with `SCRIPT LOAD`; functions (`FUNCTION LOAD`) would need 7.0 and an administrator's rights.
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

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
