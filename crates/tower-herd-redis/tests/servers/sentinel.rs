//! Sentinels say who is the primary.

use crate::{Holder, support::Sentinels, until_answered, wakes::Heard};
use std::time::Duration;
use tower_herd::store::{HolderId, StoreErrorKind};
use tower_herd_redis::{RedisConfig, RedisStore};

#[tokio::test]
async fn the_primary_is_found_and_after_a_failover_the_new_one() {
    let mut fleet = Sentinels::start(3).await;
    let urls = fleet.urls();
    let config = RedisConfig::sentinel("herd", urls.iter().map(String::as_str)).unwrap();
    let store = RedisStore::new(config.check_every(Duration::from_millis(200))).unwrap();
    let (heard, _task) = Heard::listen(&store);
    let mut holder = Holder::new(1);
    let (_, errors) = until_answered(&store, "llm", &mut holder).await;
    assert!(errors.iter().all(|kind| *kind == StoreErrorKind::Timeout), "{errors:?}");
    heard.until("llm", None).await;
    // One sentinel less is no trouble.
    fleet.sentinels[2].kill();
    let old = fleet.primary();
    let place = fleet.servers.iter().position(|server| server.port() == old).unwrap();
    fleet.servers[place].kill();
    let (_, errors) = until_answered(&store, "llm", &mut holder).await;
    assert!(!errors.is_empty());
    assert!(
        !errors.contains(&StoreErrorKind::Invalid) && !errors.contains(&StoreErrorKind::Denied),
        "{errors:?}"
    );
    let new = &fleet.servers[1 - place];
    assert_eq!(fleet.primary(), new.port());
    assert_eq!(new.cli(&["EXISTS", "herd:v1:{llm}"]), "1");
    heard.until("llm", None).await;
    assert_eq!(new.cli(&["PUBLISH", "herd:v1:{llm}:w", &HolderId(5).to_string()]), "1");
    heard.until("llm", Some(HolderId(5))).await;
}

#[tokio::test]
async fn a_name_that_no_sentinel_knows_is_unavailable() {
    let fleet = Sentinels::start(1).await;
    let urls = fleet.urls();
    let config = RedisConfig::sentinel("nobody", urls.iter().map(String::as_str)).unwrap();
    let store = RedisStore::new(crate::patient(config)).unwrap();
    let error = Holder::new(1).exchange(&store, "llm").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
}

#[tokio::test]
async fn sentinels_and_servers_have_passwords_of_their_own() {
    let fleet = Sentinels::with(1, Some(("for-servers", "for-sentinels"))).await;
    let url = format!("redis://:for-sentinels@127.0.0.1:{}/", fleet.sentinels[0].port());
    let config = || {
        let config = RedisConfig::sentinel("herd", [url.as_str()]).unwrap();
        crate::patient(config)
    };
    let store = RedisStore::new(config().credentials(None, "for-servers")).unwrap();
    Holder::new(1).exchange(&store, "llm").await.unwrap();
    let store = RedisStore::new(config().credentials(None, "wrong")).unwrap();
    let error = Holder::new(1).exchange(&store, "llm").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");
}
