//! The store.

use crate::{
    config::{ConfigError, RedisConfig},
    error::store_error,
    key::{channel, key},
    link::Purpose,
    nodes::{Arguments, Code, Nodes, Script},
    status::Status,
};
use redis::Value;
use serde::de::DeserializeOwned;
use std::{collections::BTreeSet, fmt, sync::Arc};
use tokio::{sync::watch, time::Instant};
use tower_herd::store::{Exchange, FleetStore, Grant, Listen, Report, StoreError, StoreErrorKind, Wake};

/// A fleet's store on Redis or Valkey. See the [crate](crate). A handle: clones are the same store.
///
/// Nothing is connected before the first exchange, and what is connected lives on the runtime of that exchange.
/// So make a store for each fleet, and leave the exchanges to it.
#[derive(Clone)]
pub struct RedisStore(Arc<Inner>);

struct Inner {
    config: RedisConfig,
    nodes: Nodes,
    lease: Code,
    peek: Code,
    /// Whose wake-ups are listened for: those that were exchanged for.
    providers: watch::Sender<BTreeSet<String>>,
}

impl RedisStore {
    /// One server, by its URL, with defaults otherwise: see [`RedisConfig::single`].
    ///
    /// # Errors
    ///
    /// If the URL is none.
    pub fn open(url: &str) -> Result<Self, ConfigError> {
        Self::new(RedisConfig::single(url)?)
    }

    /// A store by its configuration. Nothing is connected yet.
    ///
    /// # Errors
    ///
    /// If the configuration cannot work.
    pub fn new(config: RedisConfig) -> Result<Self, ConfigError> {
        let config = config.checked()?;
        let nodes = Nodes::new(&config, Purpose::Book)
            .map_err(|error| ConfigError::Address { place: 0, source: Box::new(error) })?;
        Ok(RedisStore(Arc::new(Inner {
            config,
            nodes,
            lease: Code::new(include_str!("lease.lua")),
            peek: Code::new(include_str!("peek.lua")),
            providers: watch::Sender::new(BTreeSet::new()),
        })))
    }

    /// What the store knows of a provider; none: nothing. Changes nothing.
    ///
    /// For people and status pages: it makes a connection of its own each time, on the caller's runtime, and is in
    /// nobody's way. Given up after the time of a connection and that of an exchange.
    ///
    /// # Errors
    ///
    /// As an exchange.
    pub async fn peek(&self, provider: &str) -> Result<Option<Status>, StoreError> {
        let inner = &*self.0;
        let nodes = Nodes::new(&inner.config, Purpose::Other).map_err(store_error)?;
        let key = key(&inner.config.prefix, provider);
        let script = Script { code: &inner.peek, key: &key, arguments: Arguments::Plain(&[]), reads: true };
        let deadline = Instant::now() + inner.config.connect_timeout + inner.config.response_timeout;
        let (answer, _) = nodes.ask(&key, deadline, &script).await.map_err(store_error)?;
        read(answer)
    }

    async fn exchange_now(&self, provider: &str, report: &Report) -> Result<Grant, StoreError> {
        let inner = &*self.0;
        let deadline = Instant::now() + inner.config.response_timeout;
        inner
            .providers
            .send_if_modified(|known| !known.contains(provider) && known.insert(provider.to_owned()));
        let report =
            serde_json::to_string(report).map_err(|error| StoreError::new(StoreErrorKind::Invalid, error))?;
        let key = key(&inner.config.prefix, provider);
        let channel = channel(&key);
        let script = Script {
            code: &inner.lease,
            key: &key,
            arguments: Arguments::Lease { report: &report, channel: &channel },
            reads: false,
        };
        let (answer, _) = inner.nodes.ask(&key, deadline, &script).await.map_err(store_error)?;
        read(answer)
    }
}

/// The scripts answer in JSON.
fn read<T: DeserializeOwned>(answer: Value) -> Result<T, StoreError> {
    let text: Vec<u8> =
        redis::from_redis_value(answer).map_err(|error| StoreError::new(StoreErrorKind::Invalid, error))?;
    serde_json::from_slice(&text).map_err(|error| StoreError::new(StoreErrorKind::Invalid, error))
}

impl FleetStore for RedisStore {
    fn exchange<'a>(&'a self, provider: &'a str, report: &'a Report) -> Exchange<'a> {
        Box::pin(self.exchange_now(provider, report))
    }

    fn listen<'a>(&'a self, wakes: &'a (dyn Fn(Wake<'_>) + Send + Sync)) -> Listen<'a> {
        Box::pin(crate::listen::listen(&self.0.config, self.0.providers.subscribe(), wakes))
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisStore").field(&self.0.config).finish()
    }
}
