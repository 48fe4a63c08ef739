//! What lies in the store, and the look at it.

use crate::{Holder, support::Redis, words};
use tower_herd::{
    PauseReason,
    store::{HolderId, News, Quantity, RateLimit, RateReport, StoreErrorKind},
};
use tower_herd_redis::RedisStore;

const KEY: &str = "herd:v1:{llm}";

#[tokio::test]
async fn a_look_shows_what_is_there_and_changes_nothing() {
    let redis = Redis::start().await;
    let store = crate::open(&redis.url());
    assert_eq!(store.peek("llm").await.unwrap(), None);
    let mut holder = Holder::new(7);
    holder.report.label = "host-1 größe".into();
    holder.report.limits.ceiling = Some(12);
    holder.report.limits.requests = Some(RateLimit { per_minute: 600, burst: 20 });
    holder.report.terms.trickle = 2;
    (holder.report.need, holder.report.busy, holder.report.held) = (5, 1, 1);
    holder.report.rates = vec![RateReport { of: Quantity::Requests, want: 3, least: 1, chunk: 0, rest: 0 }];
    holder.report.news =
        vec![News::Paused { scope: Some("model".into()), wait: 60_000, reason: PauseReason::Hint }];
    let grant = holder.exchange(&store, "llm").await.unwrap();
    let before = redis.cli(&["DUMP", KEY]);
    let status = store.peek("llm").await.unwrap().unwrap();
    assert_eq!(status.epoch, grant.epoch);
    assert_eq!(status.run, redis.info("run_id"));
    assert!(status.hard && status.learning > 0 && status.learning <= 10_000, "{status:?}");
    assert_eq!((status.configured, status.generation), (Some(12), grant.generation));
    let [member] = &status.members[..] else { panic!("{status:?}") };
    assert_eq!((member.holder, member.label.as_str()), (HolderId(7), "host-1 größe"));
    assert_eq!((member.seq, member.busy, member.need, member.charge), (1, 1, 5, grant.slots));
    assert!(member.left > 9000 && member.left <= 10_000, "{member:?}");
    assert_eq!((status.charge(), status.busy()), (u64::from(grant.slots), 1));
    let [scope] = &status.scopes[..] else { panic!("{status:?}") };
    assert_eq!(scope.scope.as_deref(), Some("model"));
    let pause = scope.pause.as_ref().unwrap();
    assert!(pause.wait > 59_000 && pause.reason == PauseReason::Hint.as_str(), "{pause:?}");
    let [rate] = &status.rates[..] else { panic!("{status:?}") };
    assert_eq!((rate.of, rate.per_minute, rate.burst), (Quantity::Requests, 600, 20));
    assert_eq!(redis.cli(&["DUMP", KEY]), before);
    assert_eq!(store.peek("other").await.unwrap(), None);
    assert_eq!(redis.cli(&["DBSIZE"]), "1");
}

/// Who may only read may look, and a server that takes no writes can be looked at.
#[tokio::test]
async fn a_look_needs_no_right_to_write_and_works_where_nothing_can_be_written() {
    let redis = Redis::start().await;
    let store = crate::open(&redis.url());
    Holder::new(7).exchange(&store, "llm").await.unwrap();
    let documented = include_str!("../../src/lib.rs");
    let line = documented.lines().find_map(|line| line.split_once("ACL SETUSER look ")).unwrap().1;
    let rights: Vec<&str> =
        line.split(' ').map(|right| if right == ">PASSWORD" { ">secret" } else { right }).collect();
    assert_eq!(redis.cli(&[&["ACL", "SETUSER", "look"], &rights[..]].concat()), "OK");
    let reader = crate::single(&redis.url()).credentials(Some("look"), "secret");
    let reader = RedisStore::new(reader).unwrap();
    assert!(reader.peek("llm").await.unwrap().is_some());
    let error = Holder::new(8).exchange(&reader, "llm").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "100kb"]), "OK");
    assert!(reader.peek("llm").await.unwrap().is_some());
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "0"]), "OK");
    let replica = Redis::with(&["--replicaof", "127.0.0.1", &redis.port().to_string()]).await;
    crate::support::until("the replica follows", async || replica.info("master_link_status") == "up").await;
    let status = crate::open(&replica.url()).peek("llm").await.unwrap().unwrap();
    assert_eq!(status.members.len(), 1);
}

#[tokio::test]
async fn a_look_at_a_server_that_is_not_there_is_a_typed_error() {
    let redis = Redis::start().await;
    let store = crate::open(&redis.url());
    drop(redis);
    assert_eq!(store.peek("llm").await.unwrap_err().kind(), StoreErrorKind::Unreachable);
}

/// Somebody else wrote there. It is an error that names itself, and nothing is destroyed that may be of use to its
/// owner; once it is gone, the book begins anew.
#[tokio::test]
async fn garbage_in_the_key_is_a_typed_error() {
    let redis = Redis::start().await;
    let store = crate::open(&redis.url());
    let mut holder = Holder::new(7);
    let own = HolderId(7).to_string();
    let garbage: [&[&str]; 7] = [
        &["SET", KEY, "text"],
        &["RPUSH", KEY, "1"],
        &["HSET", KEY, "s", "garbage"],
        &["HSET", KEY, "s", ""],
        &["HSET", KEY, "s", "\u{1}"],
        &["HSET", KEY, &own, "garbage"],
        &["HSET", KEY, "somebody", "else"],
    ];
    for command in garbage {
        // On nothing, and on a book.
        for exchanges in [0, 2] {
            redis.cli(&["DEL", KEY]);
            for _ in 0..exchanges {
                holder.exchange(&store, "llm").await.unwrap();
            }
            redis.cli(command);
            for _ in 0..2 {
                if let Err(error) = holder.exchange(&store, "llm").await {
                    assert_eq!(error.kind(), StoreErrorKind::Invalid, "{command:?} {error:?}");
                    assert!(!words(&error).is_empty());
                }
                if let Err(error) = store.peek("llm").await {
                    assert_eq!(error.kind(), StoreErrorKind::Invalid, "{command:?} {error:?}");
                }
            }
            redis.cli(&["DEL", KEY]);
            assert_eq!(holder.exchange(&store, "llm").await.unwrap().before, 0, "{command:?}");
        }
    }
}

/// redisson/redisson#4100, #6302: keys that never went, memory that only grew. Holders come and go, and what is kept is of
/// those who are there.
#[tokio::test]
async fn redisson_4100_6302_holders_that_come_and_go_leave_nothing() {
    let redis = Redis::start().await;
    let store = crate::open(&redis.url());
    let mut stays = Holder::new(0);
    stays.report.terms.ttl = 200;
    let long = std::env::var_os("TOWER_HERD_LONG").is_some();
    let mut most = 0;
    for id in 1..=if long { 100_000 } else { 2000 } {
        let mut holder = Holder::new(id);
        holder.report.terms.ttl = 200;
        holder.report.terms.keep = 0.0;
        holder.exchange(&store, "llm").await.unwrap();
        // Every other one says goodbye.
        if id % 2 == 0 {
            holder.report.bye = true;
            holder.exchange(&store, "llm").await.unwrap();
        }
        if id % 100 == 0 {
            stays.exchange(&store, "llm").await.unwrap();
            most = most.max(redis.cli(&["HLEN", KEY]).parse::<u64>().unwrap());
        }
    }
    crate::support::until("only who stays is left", async || {
        stays.exchange(&store, "llm").await.unwrap();
        redis.cli(&["HLEN", KEY]) == "2"
    })
    .await;
    let bytes: u64 = redis.cli(&["MEMORY", "USAGE", KEY]).parse().unwrap();
    // A table that has shrunk keeps some of its room. All holders would be 400 kB, in the short mode.
    assert!(bytes < 50_000, "{bytes}");
    assert!(most > 2, "{most}");
}

/// Numbers at their limits, and far beyond what makes sense, in each field of a report: it is answered, and so are the
/// others after it.
#[tokio::test]
async fn fields_at_their_limits() {
    let redis = Redis::start().await;
    let store = crate::open(&redis.url());
    let scopes = (0..200).map(|number| News::Paused {
        scope: Some(format!("scope {number} {}", "x".repeat(1000))),
        wait: u64::MAX,
        reason: PauseReason::Hint,
    });
    let (rate, huge) = (RateLimit { per_minute: u64::MAX, burst: u64::MAX }, 100_000_000_000_000);
    for step in 0..4 {
        let provider = format!("provider {step}");
        let mut other = Holder::new(1);
        other.report.limits.ceiling = Some(5);
        other.report.need = 3;
        other.exchange(&store, &provider).await.unwrap();
        let mut holder = Holder::new(u128::MAX);
        let report = &mut holder.report;
        report.label = "l".repeat(10_000);
        (report.held, report.busy, report.need) = (u32::MAX, u32::MAX, u32::MAX);
        (report.headroom, report.weight, report.served) = (u32::MAX, u32::MAX, u32::MAX);
        if step >= 1 {
            report.limits.generation = 1 << 40;
            report.limits.ceiling = Some(u32::MAX);
            report.limits.requests = Some(rate);
            report.limits.tokens = Some(RateLimit { per_minute: huge, burst: huge });
            report.rates = [Quantity::Requests, Quantity::Tokens]
                .map(|of| RateReport { of, want: u64::MAX, least: u64::MAX, chunk: u64::MAX, rest: u64::MAX })
                .into();
        }
        if step >= 2 {
            report.news = scopes.clone().collect();
            report.news.push(News::Throttled { generation: u64::MAX, calls: u32::MAX, wait: u64::MAX });
            report.news.push(News::Quota { of: Quantity::Tokens, left: u64::MAX });
        }
        if step >= 3 {
            (report.terms.ttl, report.terms.gap, report.terms.extra) = (u64::MAX, 0, u64::MAX);
            (report.terms.grace, report.terms.trickle, report.terms.keep) = (u64::MAX, u32::MAX, f64::MAX);
        }
        for round in 0..5 {
            let grant = holder.exchange(&store, &provider).await;
            assert!(grant.is_ok(), "{step} {round}: {grant:?}");
            let grant = other.exchange(&store, &provider).await;
            assert!(grant.is_ok(), "{step} {round}: {grant:?}");
            let status = store.peek(&provider).await;
            assert!(status.is_ok(), "{step} {round}: {status:?}");
        }
    }
}

#[tokio::test]
async fn a_restart_without_data_is_a_new_book() {
    let mut redis = Redis::start().await;
    let store = crate::open(&redis.url());
    let mut holder = Holder::new(7);
    let first = holder.exchange(&store, "llm").await.unwrap();
    assert_eq!(holder.exchange(&store, "llm").await.unwrap().epoch, first.epoch);
    holder.report.offer = tower_herd::store::Epoch(99);
    redis.restart().await;
    let (grant, _) = crate::until_answered(&store, "llm", &mut holder).await;
    assert_eq!(grant.epoch, tower_herd::store::Epoch(99));
    assert!(grant.learning > 0);
    // With its data, too: nobody knows what was lost in between.
    holder.report.offer = tower_herd::store::Epoch(100);
    redis.cli(&["CONFIG", "SET", "save", "3600 1"]);
    redis.cli(&["SAVE"]);
    redis.restart().await;
    assert_eq!(redis.cli(&["EXISTS", KEY]), "1");
    let (grant, _) = crate::until_answered(&store, "llm", &mut holder).await;
    assert_eq!(grant.epoch, tower_herd::store::Epoch(100));
}
