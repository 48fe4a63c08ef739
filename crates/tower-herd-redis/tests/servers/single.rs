//! One server: how it is reached, what it refuses, and what lies in it.

use crate::{Holder, support::Redis, until_answered, words};
use tower_herd::store::{FleetStore as _, StoreErrorKind};
use tower_herd_redis::RedisStore;

#[tokio::test]
async fn by_tcp_by_socket_and_in_another_database() {
    let redis = Redis::start().await;
    let database = format!("{}3", redis.url());
    for (holder, url) in [(1, redis.url()), (2, redis.socket_url()), (3, database)] {
        let store = crate::open(&url);
        let mut holder = Holder::new(holder);
        assert!(!holder.exchange(&store, "llm").await.unwrap().stale, "{url}");
        assert_eq!(holder.exchange(&store, "llm").await.unwrap().before, 1, "{url}");
    }
    assert_eq!(redis.cli(&["KEYS", "*"]), "herd:v1:{llm}");
    assert_eq!(redis.cli(&["-n", "3", "KEYS", "*"]), "herd:v1:{llm}");
    let store = RedisStore::new(crate::single(&redis.url()).prefix("other")).unwrap();
    Holder::new(1).exchange(&store, "llm").await.unwrap();
    assert_eq!(redis.cli(&["EXISTS", "other:v1:{llm}"]), "1");
}

#[tokio::test]
async fn a_wrong_or_missing_password_is_denied_in_the_servers_own_words() {
    let redis = Redis::with(&["--requirepass", "s:e/c@ret"]).await;
    let with =
        |user, password| RedisStore::new(crate::single(&redis.url()).credentials(user, password)).unwrap();
    Holder::new(1).exchange(&with(None, "s:e/c@ret"), "llm").await.unwrap();
    Holder::new(2).exchange(&with(Some("default"), "s:e/c@ret"), "llm").await.unwrap();
    let encoded = format!("redis://:s%3Ae%2Fc%40ret@127.0.0.1:{}", redis.port());
    Holder::new(3).exchange(&crate::open(&encoded), "llm").await.unwrap();
    for (store, said) in [
        (with(None, "wrong"), "WRONGPASS"),
        (with(Some("nobody"), "s:e/c@ret"), "WRONGPASS"),
        (crate::open(&redis.url()), "NOAUTH"),
    ] {
        let error = Holder::new(4).exchange(&store, "llm").await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");
        assert!(words(&error).starts_with(said), "{error:?}");
    }
}

/// The rights that the crate's documentation names are enough, and without `INFO` the run id is unknown, which is
/// said to the script and not guessed.
#[tokio::test]
async fn the_rights_that_the_documentation_names_are_enough_and_info_may_be_missing() {
    let redis = Redis::start().await;
    let documented = include_str!("../../src/lib.rs");
    let line = documented.lines().find_map(|line| line.split_once("ACL SETUSER herd ")).unwrap().1;
    let rights: Vec<&str> =
        line.split(' ').map(|right| if right == ">PASSWORD" { ">secret" } else { right }).collect();
    assert!(rights.contains(&"+info"), "{rights:?}");
    let less: Vec<&str> = rights.iter().copied().filter(|right| *right != "+info").collect();
    assert_eq!(redis.cli(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]), "OK");
    for (user, rights, run) in [("herd", &rights, ""), ("less", &less, "none")] {
        assert_eq!(redis.cli(&[&["ACL", "SETUSER", user], &rights[..]].concat()), "OK");
        redis.cli(&["SLOWLOG", "RESET"]);
        let config = crate::single(&redis.url()).credentials(Some(user), "secret");
        let store = RedisStore::new(config).unwrap();
        let mut holder = Holder::new(1);
        for _ in 0..3 {
            holder.exchange(&store, "llm").await.unwrap();
        }
        let log = redis.cli(&["--json", "SLOWLOG", "GET", "100"]);
        assert!(log.contains(&format!("\"herd:v1:{{llm}}:w\",\"{run}\",\"publish\"")), "{user}: {log}");
    }
    assert_eq!(redis.cli(&["ACL", "SETUSER", "herd", "-evalsha", "-eval"]), "OK");
    let store = RedisStore::new(crate::single(&redis.url()).credentials(Some("herd"), "secret"));
    let error = Holder::new(2).exchange(&store.unwrap(), "llm").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");
    assert!(words(&error).starts_with("NOPERM"), "{error:?}");
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn with_tls_the_server_and_where_it_asks_the_client_prove_who_they_are() {
    use crate::support::{Folder, certificates, free_port};
    let folder = Folder::new();
    certificates(folder.path());
    let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
    let (authority, certificate, key) = (read("ca.pem"), read("client.pem"), read("client.key"));
    for auth_clients in ["no", "yes"] {
        let tls = free_port().to_string();
        let own = folder.path().to_str().unwrap();
        let [ca, cert, secret] = ["ca.pem", "server.pem", "server.key"].map(|name| format!("{own}/{name}"));
        let options = [
            "--tls-port",
            &tls,
            "--tls-ca-cert-file",
            &ca,
            "--tls-cert-file",
            &cert,
            "--tls-key-file",
            &secret,
            "--tls-auth-clients",
            auth_clients,
        ];
        let redis = Redis::with(&options).await;
        for host in ["localhost", "127.0.0.1"] {
            let config = || crate::single(&format!("rediss://{host}:{tls}/"));
            let trusting = RedisStore::new(config().tls_authority(authority.clone())).unwrap();
            let known = RedisStore::new(
                config().tls_authority(authority.clone()).tls_identity(certificate.clone(), key.clone()),
            );
            let doubting = RedisStore::new(config()).unwrap();
            let mut holder = Holder::new(1);
            holder.exchange(&known.unwrap(), "llm").await.unwrap();
            assert_eq!(holder.exchange(&trusting, "llm").await.is_ok(), auth_clients == "no");
            let error = holder.exchange(&doubting, "llm").await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{error:?}");
            assert!(words(&error).contains("certificate"), "{error:?}");
        }
        drop(redis);
    }
}

/// Redis forgets scripts when it is told to, and when it starts.
#[tokio::test]
async fn a_script_that_was_forgotten_is_brought_along() {
    let mut redis = Redis::start().await;
    let store = crate::open(&redis.url());
    let mut holder = Holder::new(1);
    holder.exchange(&store, "llm").await.unwrap();
    // The first look at a server asks for its run id by EVAL, too.
    let before = redis.calls("eval");
    for _ in 0..3 {
        holder.exchange(&store, "llm").await.unwrap();
    }
    assert_eq!(redis.calls("eval"), before);
    for flushes in 1..=5 {
        redis.cli(&["SCRIPT", "FLUSH"]);
        assert!(!holder.exchange(&store, "llm").await.unwrap().stale);
        assert_eq!(redis.calls("eval"), before + flushes);
    }
    redis.restart().await;
    until_answered(&store, "llm", &mut holder).await;
}

/// redis/redis#8623, #6565: scripts that write fail at the limit, whatever may be evicted.
#[tokio::test]
async fn redis_8623_6565_no_memory_is_an_outage_and_passes() {
    let redis = Redis::with(&["--maxmemory-policy", "allkeys-lru"]).await;
    let store = crate::open(&redis.url());
    let mut holder = Holder::new(1);
    holder.exchange(&store, "llm").await.unwrap();
    let connections = redis.info("total_connections_received");
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]), "OK");
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "100kb"]), "OK");
    for _ in 0..3 {
        let error = holder.exchange(&store, "llm").await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
        assert!(words(&error).starts_with("OOM"), "{error:?}");
    }
    assert_eq!(redis.cli(&["CONFIG", "SET", "maxmemory", "0"]), "OK");
    assert_eq!(holder.exchange(&store, "llm").await.unwrap().before, 1);
    // The connection is not at fault. (Each look of this test is one of its own.)
    let since: u64 = redis.info("total_connections_received").parse::<u64>().unwrap()
        - connections.parse::<u64>().unwrap();
    assert_eq!(since, 4);
}

/// redisson/redisson#4822: after a failover nobody could lock.
#[tokio::test]
async fn redisson_4822_a_replica_refuses_and_serves_once_it_is_the_primary() {
    let primary = Redis::start().await;
    let replica = Redis::with(&["--replicaof", "127.0.0.1", &primary.port().to_string()]).await;
    let store = crate::open(&replica.url());
    let mut holder = Holder::new(1);
    for _ in 0..3 {
        let error = holder.exchange(&store, "llm").await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    }
    assert_eq!(replica.cli(&["REPLICAOF", "NO", "ONE"]), "OK");
    let (grant, errors) = until_answered(&store, "llm", &mut holder).await;
    assert_eq!(grant.before, 0);
    assert!(errors.iter().all(|kind| *kind == StoreErrorKind::Unavailable), "{errors:?}");
    // And the other way round, on a connection that did work.
    assert_eq!(replica.cli(&["REPLICAOF", "127.0.0.1", &primary.port().to_string()]), "OK");
    let error = holder.exchange(&store, "llm").await.unwrap_err();
    assert!(words(&error).starts_with("READONLY"), "{error:?}");
}

#[tokio::test]
async fn a_server_that_loads_its_data_is_unavailable_until_it_has_them() {
    let mut redis = Redis::with(&[
        "--save",
        "3600 1",
        "--enable-debug-command",
        "yes",
        "--loading-process-events-interval-bytes",
        "1024",
        "--key-load-delay",
        "1000",
        "--rdbcompression",
        "no",
    ])
    .await;
    let store = crate::open(&redis.url());
    let mut holder = Holder::new(1);
    holder.exchange(&store, "llm").await.unwrap();
    assert_eq!(redis.cli(&["DEBUG", "POPULATE", "2000", "key", "100"]), "OK");
    assert_eq!(redis.cli(&["SAVE"]), "OK");
    redis.restart().await;
    let mut said = Vec::new();
    crate::support::until("the data are there", async || match holder.exchange(&store, "llm").await {
        Ok(_) => true,
        Err(error) => {
            said.push((error.kind(), words(&error)));
            false
        }
    })
    .await;
    assert!(
        said.iter().any(|(kind, words)| *kind == StoreErrorKind::Unavailable && words.starts_with("LOADING")),
        "{said:?}"
    );
}

#[tokio::test]
async fn any_name_is_a_name() {
    let redis = Redis::start().await;
    let store = crate::open(&redis.url());
    let long = "x".repeat(10_000);
    let names =
        ["", "{", "}", "{}", "{a}b", "a{b}", "%", "%7B", "größe 🐎", "with space\nand line", "*", &long];
    for round in 0..2 {
        for name in names {
            let mut holder = Holder::new(1);
            holder.report.seq = round;
            assert_eq!(store.exchange(name, holder.next()).await.unwrap().before, round, "{name}");
        }
    }
    assert_eq!(redis.cli(&["DBSIZE"]), names.len().to_string());
}

/// dv/redis-semaphore#69: companion keys that end at different times. marcosbarbero/spring-cloud-zuul-ratelimit#162,
/// alisaifee/limits#14: a step outside the script that is lost.
#[tokio::test]
async fn redis_semaphore_69_zuul_ratelimit_162_limits_14_one_key_and_one_step() {
    let redis = Redis::start().await;
    let store = crate::open(&redis.url());
    let mut holder = Holder::new(1);
    for round in 1..=20 {
        holder.exchange(&store, "llm").await.unwrap();
        assert_eq!(redis.cli(&["KEYS", "*"]), "herd:v1:{llm}");
        assert_eq!(redis.cli(&["TTL", "herd:v1:{llm}"]), "-1");
        if round % 5 == 0 {
            assert_eq!(redis.cli(&["DEL", "herd:v1:{llm}"]), "1");
            assert_eq!(holder.exchange(&store, "llm").await.unwrap().before, 0);
        }
    }
    // Nothing of ours but the script, and what a connection begins with.
    assert_eq!(
        redis.calls("multi") + redis.calls("expire") + redis.calls("pexpire") + redis.calls("persist"),
        0
    );
    // 24 exchanges, the question for the run id, and one more since the server did not know the script at first.
    assert_eq!(redis.calls("evalsha") + redis.calls("eval"), 24 + 1 + 1);
}
