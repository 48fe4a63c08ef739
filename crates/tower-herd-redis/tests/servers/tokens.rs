//! Retry tokens.

use crate::support::{
    Cluster, Redis,
    proxy::{Flow, Proxy},
};
use std::time::Duration;
use tower_herd::{
    retry_token::{Claim, HolderId, RetryTokens as _, Schedule},
    store::StoreErrorKind,
};
use tower_herd_redis::{RedisConfig, RedisTokens};
use tower_herd_sim::tokens::{Race, check, race};

#[tokio::test(flavor = "multi_thread")]
async fn the_contract_is_kept_by_one_server() {
    let redis = Redis::start().await;
    let tokens = RedisTokens::new(crate::single(&redis.url())).unwrap();
    check(&tokens, "check").await.assert_kept();
    race(&tokens, "race", Race::default()).await.assert_kept();
    // Many processes, each with its own connection, and scripts that are forgotten meanwhile.
    redis.cli(&["SCRIPT", "FLUSH"]);
    check(&RedisTokens::new(crate::single(&redis.socket_url())).unwrap(), "{tag}").await.assert_kept();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_contract_is_kept_by_a_cluster() {
    let cluster = Cluster::start().await;
    let urls = cluster.urls();
    let tokens = RedisTokens::new(crate::patient(
        RedisConfig::cluster(urls.iter().take(1).map(String::as_str)).unwrap(),
    ))
    .unwrap();
    check(&tokens, "check").await.assert_kept();
    let written: Vec<u64> = cluster.nodes.iter().map(|node| node.calls("hset")).collect();
    assert!(written.iter().all(|written| *written > 20), "{written:?}");
    // A slot that moves while its token is closed.
    let schedule = Schedule::new().growth(Duration::from_secs(60), 1.0, Duration::from_secs(60)).unwrap();
    let Claim::Granted(grant) = tokens.claim("moved", &schedule).await.unwrap() else { panic!("closed") };
    let key = "herd:token:v1:moved";
    let slot = cluster.slot(key);
    let from = cluster.owner(slot);
    let to = (from + 1) % 3;
    cluster.begin_move(slot, from, to);
    cluster.move_key(key, from, to);
    assert!(matches!(tokens.claim("moved", &schedule).await.unwrap(), Claim::NotBefore(_)));
    assert!(tokens.extend("moved", grant.holder, Duration::from_secs(70)).await.unwrap());
    cluster.end_move(slot, from, to);
    assert!(matches!(tokens.claim("moved", &schedule).await.unwrap(), Claim::NotBefore(_)));
    assert!(tokens.clear("moved", grant.holder).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_that_the_documentation_names_are_enough() {
    let redis = Redis::start().await;
    let documented = include_str!("../../src/token.rs");
    let line = documented.lines().find_map(|line| line.split_once("ACL SETUSER jobs ")).unwrap().1;
    let rights: Vec<&str> =
        line.split(' ').map(|right| if right == ">PASSWORD" { ">secret" } else { right }).collect();
    assert_eq!(redis.cli(&[&["ACL", "SETUSER", "jobs"], &rights[..]].concat()), "OK");
    let config = crate::single(&redis.url()).credentials(Some("jobs"), "secret");
    check(&RedisTokens::new(config).unwrap(), "check").await.assert_kept();
}

/// The server forgets what is history, and not before.
#[tokio::test]
async fn a_token_expires_by_itself_long_after_it_has_opened() {
    let redis = Redis::start().await;
    let tokens = RedisTokens::new(crate::single(&redis.url())).unwrap();
    let expiry = |key: &str| redis.cli(&["PTTL", &format!("herd:token:v1:{key}")]).parse::<u64>().unwrap();
    let near = |millis: u64, expected: u64| {
        assert!(millis <= expected && millis + 5000 > expected, "{millis} {expected}");
    };
    let hours = |hours: u64| Duration::from_secs(hours * 3600);
    let short = Schedule::new().jitter(0.0).unwrap();
    let Claim::Granted(grant) = tokens.claim("short", &short).await.unwrap() else { panic!("closed") };
    near(expiry("short"), 3_600_000 + 2000);
    assert!(tokens.extend("short", grant.holder, hours(2)).await.unwrap());
    near(expiry("short"), 3 * 3_600_000);
    let long = Schedule::new().growth(hours(1), 2.0, hours(24)).unwrap().jitter(0.0).unwrap();
    tokens.claim("long", &long).await.unwrap();
    near(expiry("long"), 49 * 3_600_000);
    assert!(tokens.extend("short", grant.holder, Duration::MAX).await.unwrap());
    assert!(tokens.peek("short").await.unwrap().unwrap().wait > hours(24 * 365));
}

#[tokio::test]
async fn what_lies_in_the_way_is_begun_anew_and_any_name_is_a_key() {
    let redis = Redis::start().await;
    let tokens = RedisTokens::new(crate::single(&redis.url())).unwrap();
    let schedule = Schedule::new();
    redis.cli(&["SET", "herd:token:v1:text", "garbage"]);
    redis.cli(&["RPUSH", "herd:token:v1:list", "1"]);
    redis.cli(&["HSET", "herd:token:v1:half", "n", "99999999999999999", "s", "3"]);
    redis.cli(&["HSET", "herd:token:v1:words", "n", "x", "s", "y", "h", "z", "i", "nan"]);
    let long = "k".repeat(10_000);
    for key in ["text", "list", "half", "words", "", "{", "{}", "größe 🐎", "a\nb", &long] {
        assert_eq!(tokens.peek(key).await.unwrap(), None, "{key}");
        assert!(!tokens.clear(key, HolderId::from(0)).await.unwrap());
        let Claim::Granted(grant) = tokens.claim(key, &schedule).await.unwrap() else {
            panic!("{key}: closed")
        };
        assert_eq!(grant.streak, 1);
        assert_eq!(tokens.peek(key).await.unwrap().unwrap().holder, grant.holder);
        assert!(matches!(tokens.claim(key, &schedule).await.unwrap(), Claim::NotBefore(_)));
    }
    // A streak and an instant at their limits.
    for (closed, streak) in [("1", "4294967295"), ("-1", "1e300")] {
        redis.cli(&[
            "HSET",
            "herd:token:v1:limits",
            "n",
            closed,
            "s",
            streak,
            "h",
            "00000000000000ff",
            "i",
            "0",
        ]);
        let Claim::Granted(grant) = tokens.claim("limits", &schedule).await.unwrap() else {
            panic!("closed")
        };
        assert_eq!(grant.streak, u32::MAX);
        assert!(
            grant.next_in >= Duration::from_secs(420) && grant.next_in <= Duration::from_secs(780),
            "{grant:?}"
        );
    }
    redis.cli(&["HSET", "herd:token:v1:holder", "n", "1", "s", "1", "h", "not hex", "i", "0"]);
    assert_eq!(tokens.peek("holder").await.unwrap_err().kind(), StoreErrorKind::Invalid);
}

/// The answer is lost, the grant is not: nobody else gets one.
#[tokio::test]
async fn a_store_that_does_not_answer_is_a_typed_error_and_a_lost_grant_counts() {
    let redis = Redis::start().await;
    let proxy = Proxy::start(redis.port());
    let config = RedisConfig::single(&proxy.url()).unwrap().response_timeout(Duration::from_millis(400));
    let tokens = RedisTokens::new(config).unwrap();
    let other = RedisTokens::new(crate::single(&redis.url())).unwrap();
    let schedule = Schedule::new().growth(Duration::from_secs(60), 1.0, Duration::from_secs(60)).unwrap();
    crate::support::until("an answer", async || tokens.claim("warm", &schedule).await.is_ok()).await;
    other.claim("warm", &schedule).await.unwrap();
    proxy.down(Flow::Lose);
    assert_eq!(tokens.claim("job", &schedule).await.unwrap_err().kind(), StoreErrorKind::Timeout);
    assert!(matches!(other.claim("job", &schedule).await.unwrap(), Claim::NotBefore(_)));
    proxy.heal();
    drop(redis);
    assert_eq!(other.claim("job", &schedule).await.unwrap_err().kind(), StoreErrorKind::Unreachable);
}
