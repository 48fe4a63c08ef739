//! Fleets over a real server: what one process is told holds for the other.

use crate::support::{Redis, until};
use std::time::Duration;
use tower_herd::{Fleet, Provider, ProviderSettings, store::FleetSettings};
use tower_herd_redis::RedisStore;

fn member(redis: &Redis, label: &str) -> (Fleet, Provider) {
    let store = crate::open(&redis.url());
    let fleet = Fleet::shared(store, FleetSettings::new().label(label)).unwrap();
    let provider = fleet.configure("llm", ProviderSettings::new().ceiling(20)).unwrap();
    (fleet, provider)
}

#[tokio::test]
async fn two_fleets_share_a_ceiling_and_say_goodbye() {
    let redis = Redis::start().await;
    let ((here, one), (there, two)) = (member(&redis, "one"), member(&redis, "two"));
    until("both know of each other", async || {
        [&one, &two].iter().all(|provider| provider.lease().is_some_and(|lease| lease.members == 2))
    })
    .await;
    let store = crate::open(&redis.url());
    let status = store.peek("llm").await.unwrap().unwrap();
    let mut labels: Vec<_> = status.members.iter().map(|member| member.label.as_str()).collect();
    labels.sort_unstable();
    assert_eq!(labels, ["one", "two"]);
    assert_eq!((status.ceiling, status.configured), (20, Some(20)));
    here.leave().await;
    until("one has left", async || two.lease().is_some_and(|lease| lease.members == 1)).await;
    there.leave().await;
    let status = store.peek("llm").await.unwrap().unwrap();
    // Their numbers are kept for a ttl, so that a report that comes late is known to be old.
    assert!(status.members.iter().all(|member| member.gone && member.charge == 0), "{status:?}");
}

/// With wake-ups, and where the fleet's user has no right to them: then by the next renewal.
#[tokio::test]
async fn a_pause_of_one_is_known_to_the_other_with_wake_ups_and_without() {
    let redis = Redis::start().await;
    assert_eq!(
        redis.cli(&["ACL", "SETUSER", "mute", "on", ">secret", "~herd:*", "+@all", "resetchannels"]),
        "OK"
    );
    for user in ["default", "mute"] {
        let member = |label: &str| {
            let config =
                crate::single(&redis.url()).prefix(format!("herd:{user}")).credentials(Some(user), "secret");
            let store = RedisStore::new(config).unwrap();
            let fleet = Fleet::shared(store, FleetSettings::new().label(label)).unwrap();
            let provider = fleet.configure("llm", ProviderSettings::new().ceiling(20)).unwrap();
            (fleet, provider)
        };
        let ((_here, one), (_there, two)) = (member("one"), member("two"));
        until("both know of each other", async || {
            [&one, &two].iter().all(|provider| provider.lease().is_some_and(|lease| lease.members == 2))
        })
        .await;
        one.pause_for(Duration::from_secs(60));
        until("the other is paused", async || two.paused_until().is_some()).await;
        two.clear_pause();
        until("the first goes on", async || one.paused_until().is_none()).await;
    }
}

/// The hot path and the application's runtime do not notice; once the server is back, so is the fleet.
#[tokio::test]
async fn a_server_that_goes_and_comes_back() {
    let mut redis = Redis::start().await;
    let (fleet, _provider) = member(&redis, "one");
    let store = crate::open(&redis.url());
    until("it has reported", async || matches!(store.peek("llm").await, Ok(Some(_)))).await;
    let run = store.peek("llm").await.unwrap().unwrap().run;
    redis.kill();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    redis.start_again().await;
    until("it has reported to the new one", async || {
        matches!(store.peek("llm").await, Ok(Some(status)) if status.run != run && status.members.len() == 1)
    })
    .await;
    fleet.leave().await;
}
