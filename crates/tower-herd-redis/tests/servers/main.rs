//! The store against real servers, in each mode, and what goes wrong there.

#[path = "../support/mod.rs"]
mod support;

mod book;
mod cluster;
mod connections;
mod fleet;
mod sentinel;
mod single;
mod tokens;
mod wakes;

use std::{error::Error as _, time::Duration};
use tower_herd::store::{Epoch, FleetStore as _, Grant, HolderId, Report, StoreError, StoreErrorKind};
use tower_herd_redis::{RedisConfig, RedisStore};

/// One process of a fleet, as its store sees it.
#[derive(Debug)]
pub(crate) struct Holder {
    pub(crate) report: Report,
}

impl Holder {
    pub(crate) fn new(id: u128) -> Self {
        let mut report = Report::new(HolderId(id), Epoch(0xfeed ^ id as u64));
        report.seq = 0;
        Holder { report }
    }

    /// The next report.
    pub(crate) fn next(&mut self) -> &Report {
        self.report.seq += 1;
        &self.report
    }

    pub(crate) async fn exchange(&mut self, store: &RedisStore, provider: &str) -> Result<Grant, StoreError> {
        store.exchange(provider, self.next()).await
    }
}

/// With so much time that a busy machine is no trouble, for tests that are not about time.
pub(crate) fn patient(config: RedisConfig) -> RedisConfig {
    config.response_timeout(Duration::from_secs(10)).connect_timeout(Duration::from_secs(10))
}

pub(crate) fn single(url: &str) -> RedisConfig {
    patient(RedisConfig::single(url).unwrap())
}

pub(crate) fn open(url: &str) -> RedisStore {
    RedisStore::new(single(url)).unwrap()
}

/// What the server itself said.
pub(crate) fn words(error: &StoreError) -> String {
    error.source().map(ToString::to_string).unwrap_or_default()
}

/// Exchanges until it is answered, and says what went wrong before.
pub(crate) async fn until_answered(
    store: &RedisStore,
    provider: &str,
    holder: &mut Holder,
) -> (Grant, Vec<StoreErrorKind>) {
    let mut errors = Vec::new();
    let mut answer = None;
    support::until("an answer", async || {
        match holder.exchange(store, provider).await {
            Ok(grant) => answer = Some(grant),
            Err(error) => errors.push(error.kind()),
        }
        answer.is_some()
    })
    .await;
    (answer.unwrap(), errors)
}
