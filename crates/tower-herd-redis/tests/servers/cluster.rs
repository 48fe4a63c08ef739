//! A cluster of three: where a key is, and what happens while it moves.

use crate::{
    Holder,
    support::{Cluster, until},
    until_answered,
    wakes::Heard,
    words,
};
use std::time::Duration;
use tower_herd::store::{HolderId, StoreErrorKind};
use tower_herd_redis::{RedisConfig, RedisStore};

fn store(cluster: &Cluster, nodes: usize) -> RedisStore {
    let urls = cluster.urls();
    let config = RedisConfig::cluster(urls.iter().take(nodes).map(String::as_str)).unwrap();
    RedisStore::new(crate::patient(config).check_every(Duration::from_millis(200))).unwrap()
}

/// A provider whose key lies at each node.
fn one_at_each(cluster: &Cluster) -> Vec<String> {
    let mut found = vec![None, None, None];
    for number in 0.. {
        let provider = format!("provider {number}");
        let owner = cluster.owner(cluster.slot(&format!("herd:v1:{{{provider}}}")));
        found[owner].get_or_insert(provider);
        if found.iter().all(Option::is_some) {
            break;
        }
    }
    found.into_iter().flatten().collect()
}

/// BerriAI/litellm#14968, #15052, PostHog#60838: a script over keys of several slots was refused, and the limiter
/// stood open. Here all of a provider is one key, and its channel lies in the same slot.
#[tokio::test]
async fn litellm_14968_15052_posthog_60838_all_of_a_provider_lies_in_one_slot() {
    let cluster = Cluster::start().await;
    let store = store(&cluster, 1);
    let (heard, _task) = Heard::listen(&store);
    let names = ["", "{", "}{", "{a}b", "a{b}c", "größe", "%"];
    let each = one_at_each(&cluster);
    let providers: Vec<&str> = names.iter().copied().chain(each.iter().map(String::as_str)).collect();
    for round in 0..3 {
        for provider in &providers {
            let mut holder = Holder::new(1);
            holder.report.seq = round;
            assert_eq!(holder.exchange(&store, provider).await.unwrap().before, round, "{provider}");
        }
    }
    let mut woken: Vec<String> = Vec::new();
    until("all are subscribed to", async || {
        woken.extend(heard.take().into_iter().map(|(provider, _)| provider));
        providers.iter().all(|provider| woken.iter().any(|woken| woken == provider))
    })
    .await;
    for (node, provider) in cluster.nodes.iter().zip(&each) {
        let key = format!("herd:v1:{{{provider}}}");
        assert_eq!(node.cli(&["EXISTS", &key]), "1");
        let channel = format!("{key}:w");
        assert_eq!(cluster.slot(&key), cluster.slot(&channel));
        // A message of a shard stays in it.
        assert!(node.cli(&["PUBSUB", "SHARDCHANNELS"]).contains(&channel));
        assert_eq!(node.cli(&["SPUBLISH", &channel, &HolderId(9).to_string()]), "1");
        heard.until(provider, Some(HolderId(9))).await;
        // What the script itself publishes goes the same way.
        let mut holder = Holder::new(2);
        let reason = tower_herd::PauseReason::Hint;
        holder.report.news = vec![tower_herd::store::News::Paused { scope: None, wait: 60_000, reason }];
        holder.exchange(&store, provider).await.unwrap();
        heard.until(provider, None).await;
    }
}

#[tokio::test]
async fn a_slot_that_moves_is_followed() {
    let cluster = Cluster::start().await;
    let store = store(&cluster, 3);
    let (heard, _task) = Heard::listen(&store);
    let provider = &one_at_each(&cluster)[0];
    let key = format!("herd:v1:{{{provider}}}");
    let slot = cluster.slot(&key);
    let mut holder = Holder::new(1);
    assert_eq!(holder.exchange(&store, provider).await.unwrap().before, 0);
    heard.until(provider, None).await;
    for (from, to) in [(0, 1), (1, 2), (2, 0)] {
        cluster.begin_move(slot, from, to);
        let seq = holder.report.seq;
        assert_eq!(holder.exchange(&store, provider).await.unwrap().before, seq, "still there");
        cluster.move_key(&key, from, to);
        // Another server, of which nobody knows whether it has all: the book begins anew, and for a while nobody
        // is given more.
        let grant = holder.exchange(&store, provider).await.unwrap();
        assert!(grant.before == 0 && grant.learning > 0, "{grant:?}");
        for _ in 0..3 {
            let seq = holder.report.seq;
            assert_eq!(holder.exchange(&store, provider).await.unwrap().before, seq, "ASK");
        }
        heard.take();
        cluster.end_move(slot, from, to);
        for _ in 0..3 {
            let seq = holder.report.seq;
            assert_eq!(holder.exchange(&store, provider).await.unwrap().before, seq, "MOVED");
        }
        assert_eq!(cluster.nodes[to].cli(&["EXISTS", &key]), "1");
        // Its subscription follows too.
        until("the subscription has moved", async || {
            cluster.nodes[to].cli(&["PUBSUB", "SHARDCHANNELS"]).contains(&key)
        })
        .await;
        cluster.nodes[to].cli(&["SPUBLISH", &format!("{key}:w"), &HolderId(9).to_string()]);
        heard.until(provider, Some(HolderId(9))).await;
    }
}

/// A slot on its way in which the key is not yet: it is made where the slot goes to.
#[tokio::test]
async fn a_new_provider_in_a_slot_that_moves_is_made_where_it_goes_to() {
    let cluster = Cluster::start().await;
    let store = store(&cluster, 3);
    let provider = &one_at_each(&cluster)[1];
    let key = format!("herd:v1:{{{provider}}}");
    let slot = cluster.slot(&key);
    cluster.begin_move(slot, 1, 2);
    let mut holder = Holder::new(1);
    for seq in 0..3 {
        assert_eq!(holder.exchange(&store, provider).await.unwrap().before, seq);
    }
    cluster.end_move(slot, 1, 2);
    assert_eq!(holder.exchange(&store, provider).await.unwrap().before, 3);
    assert_eq!(cluster.nodes[2].cli(&["EXISTS", &key]), "1");
}

#[tokio::test]
async fn each_node_forgets_scripts_for_itself() {
    let cluster = Cluster::start().await;
    let store = store(&cluster, 3);
    let providers = one_at_each(&cluster);
    let mut holders: Vec<Holder> = (0..3).map(|_| Holder::new(1)).collect();
    for round in 0..4_usize {
        for (provider, holder) in providers.iter().zip(&mut holders) {
            let seq = holder.report.seq;
            assert_eq!(holder.exchange(&store, provider).await.unwrap().before, seq);
        }
        cluster.nodes[round % 3].cli(&["SCRIPT", "FLUSH"]);
    }
}

#[tokio::test]
async fn a_node_that_dies_takes_only_its_own_providers_with_it() {
    let mut cluster = Cluster::start().await;
    let store = store(&cluster, 1);
    let providers = one_at_each(&cluster);
    let mut holders: Vec<Holder> = (0..3).map(|_| Holder::new(1)).collect();
    for (provider, holder) in providers.iter().zip(&mut holders) {
        holder.exchange(&store, provider).await.unwrap();
    }
    // The only node that it was told of; the others it has learned.
    cluster.nodes[0].kill();
    for round in 1..=3 {
        let error = holders[0].exchange(&store, &providers[0]).await.unwrap_err();
        assert!(
            matches!(
                error.kind(),
                StoreErrorKind::Unreachable | StoreErrorKind::Unavailable | StoreErrorKind::Timeout
            ),
            "{error:?} {}",
            words(&error)
        );
        for place in [1, 2] {
            assert_eq!(holders[place].exchange(&store, &providers[place]).await.unwrap().before, round);
        }
    }
    cluster.nodes[0].start_again().await;
    let (grant, _) = until_answered(&store, &providers[0], &mut holders[0]).await;
    assert_eq!(grant.before, 0, "it came back empty");
}

#[tokio::test]
async fn a_cluster_that_is_taken_for_a_single_server_says_so() {
    let cluster = Cluster::start().await;
    let provider = &one_at_each(&cluster)[1];
    let store = crate::open(&cluster.nodes[0].url());
    let error = Holder::new(1).exchange(&store, provider).await.unwrap_err();
    assert!(words(&error).starts_with("MOVED"), "{error:?}");
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn a_cluster_by_tls_with_a_password() {
    use crate::support::{Folder, certificates};
    let folder = Folder::new();
    certificates(folder.path());
    let own = folder.path().to_str().unwrap();
    let [ca, cert, key] = ["ca.pem", "server.pem", "server.key"].map(|name| format!("{own}/{name}"));
    let options = [
        "--tls-ca-cert-file",
        &ca,
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
        "--tls-auth-clients",
        "no",
        "--requirepass",
        "secret",
    ];
    let cluster = Cluster::with(&options, true).await;
    let url = format!("rediss://127.0.0.1:{}/", cluster.nodes[0].tls_port().unwrap());
    let config = crate::patient(RedisConfig::cluster([url.as_str()]).unwrap()).credentials(None, "secret");
    let store = RedisStore::new(config.tls_authority(std::fs::read(ca).unwrap())).unwrap();
    let (heard, _task) = Heard::listen(&store);
    for provider in one_at_each(&cluster) {
        let mut holder = Holder::new(1);
        until_answered(&store, &provider, &mut holder).await;
        heard.until(&provider, None).await;
    }
    let denied = crate::patient(RedisConfig::cluster([url.as_str()]).unwrap()).credentials(None, "wrong");
    let denied =
        RedisStore::new(denied.tls_authority(std::fs::read(own.to_owned() + "/ca.pem").unwrap())).unwrap();
    let error = Holder::new(1).exchange(&denied, "llm").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");
}
