//! Whether the hosts still reach each other, asked beside MPI, which does not notice a link that is cut.
//!
//! The lowest rank of each host holds a TCP connection to that of the host before it, the other ranks of a host hold one to
//! their lowest. Nothing is sent over them: the kernels ask each other whether they are there, so that a rank may load,
//! compile, be short of a core or be stopped for as long as it likes. What shows is silence of a kernel. Whoever sees it ends
//! the job and tells the ranks that it still reaches, and they those that they do: also where no launcher can.
//!
//! Where a connection can't be made, as behind a firewall, it is not watched, and the phases' limits remain. A process that
//! ends closes its connections, which is its launcher's concern and not this module's.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::net::sockopt;

use super::agree::Ranks;
use super::{World, ending};
use crate::exit::Exit;
use crate::host;
use crate::ids::Rank;

/// A connection that is silent for so long is asked for the first time, and then every [`ASKED_EVERY`].
const ASKED_AFTER: Duration = Duration::from_secs(10);
const ASKED_EVERY: Duration = Duration::from_secs(5);
const MAX_UNANSWERED: u32 = 3;
/// Silence of a host that ends the job. Long enough for a switch that finds its paths anew.
const SILENCE: Duration = Duration::from_secs(25);

/// Two ranks see a host go that lies between them. The lower one speaks, the other only if it has not been ended meanwhile.
const TURN: Duration = Duration::from_secs(5);
/// How long a rank that is told leaves to the launcher, which ends it where it can.
const TOLD_WAITS: Duration = Duration::from_secs(1);
/// How long a connection may take to come about, and to say whose it is.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// The one thing that is ever said: all ranks end, and somebody has said why.
const ENDS: u8 = 1;

/// What a rank tells the others of itself.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
struct Card {
    /// The lowest rank on its host.
    first_on_host: u32,
    host: String,
    /// Absent on ranks that nobody connects to.
    listens: Option<Listens>,
}

/// Where a rank is connected to, and what is said there first, so that strangers are told from ranks.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
struct Listens {
    addresses: Vec<IpAddr>,
    port: u16,
    secret: u64,
}

/// How a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The process at its other end has gone.
    Closed,
    /// It says that all ranks end.
    Told,
    /// Its host does not answer.
    Silent,
}

struct Links {
    rank: Rank,
    cards: Vec<Card>,
    /// Connections by the rank at their other end.
    peers: Mutex<Vec<(Rank, TcpStream)>>,
}

impl World {
    /// Watches the hosts from here on; collective. Nothing where all ranks are on one.
    pub(super) fn watch_hosts(&self) {
        if self.local_size == self.size {
            return;
        }
        let listener = if self.rank == self.first_on_host { listen().ok() } else { None };
        let listens = listener.as_ref().and_then(|listener| {
            let secret = RandomState::new().build_hasher().finish();
            Some(Listens { addresses: host::addresses(), port: listener.local_addr().ok()?.port(), secret })
        });
        let card = Card { first_on_host: self.first_on_host.0, host: self.host.clone(), listens };
        let cards = self.all_gather_bytes(&serde_json::to_vec(&card).unwrap_or_default());
        let Ok(cards) = cards.iter().map(|card| serde_json::from_slice(card)).collect::<Result<Vec<Card>, _>>() else {
            tracing::debug!("a rank's addresses can't be read; links between hosts are not watched");
            return;
        };
        let links = Arc::new(Links { rank: self.rank, cards, peers: Mutex::default() });
        if let Some(listener) = listener {
            let links = Arc::clone(&links);
            spawn(move || links.accept(&listener));
        }
        spawn(move || links.connect());
    }
}

/// Without its thread a connection is not watched, and nothing else is missing.
fn spawn(body: impl FnOnce() + Send + 'static) {
    let _ = thread::Builder::new().name("links".to_owned()).spawn(body);
}

fn listen() -> io::Result<TcpListener> {
    // The former takes IPv4 as well, where there is IPv6 at all.
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
}

/// Whom `rank` connects to: the lowest on its host, and that one to the lowest of the host before.
fn connects_to(cards: &[Card], rank: Rank) -> Option<Rank> {
    let own = cards[rank.index()].first_on_host;
    let before = || cards.iter().map(|card| card.first_on_host).filter(|first| *first < own).max();
    if own == rank.0 { before() } else { Some(own) }.map(Rank)
}

fn end_of(read: io::Result<()>) -> End {
    match read {
        Ok(()) => End::Told,
        Err(error) => match error.kind() {
            ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => End::Silent,
            _ => End::Closed,
        },
    }
}

/// Has the kernel ask whether the other end's is there.
fn watch(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, ASKED_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, ASKED_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, MAX_UNANSWERED)?;
    // Keeps to the same where something is under way, which is not asked about. A second less than the last question, which
    // otherwise may find that the time is not quite over.
    let limit = u32::try_from((SILENCE - Duration::from_secs(1)).as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, limit)?;
    stream.set_read_timeout(None)
}

impl Links {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming().flatten() {
            let links = Arc::clone(self);
            spawn(move || {
                if let Some(peer) = links.greeted_by(&stream) {
                    links.follow(peer, &stream);
                }
            });
        }
    }

    /// The rank that has connected; none where it is a stranger.
    fn greeted_by(&self, mut stream: &TcpStream) -> Option<Rank> {
        stream.set_read_timeout(Some(CONNECT_LIMIT)).ok()?;
        let mut greeting = [0; 12];
        stream.read_exact(&mut greeting).ok()?;
        let (secret, rank) = greeting.split_first_chunk()?;
        let rank = Rank(u32::from_le_bytes(rank.try_into().ok()?));
        let expected = self.cards[self.rank.index()].listens.as_ref()?.secret;
        let is_one_of_us = u64::from_le_bytes(*secret) == expected && rank.index() < self.cards.len();
        if is_one_of_us {
            stream.write_all(&(!expected).to_le_bytes()).ok()?;
        }
        is_one_of_us.then_some(rank)
    }

    fn connect(self: &Arc<Self>) {
        let Some(peer) = connects_to(&self.cards, self.rank) else { return };
        match self.greet(peer) {
            Some(stream) => self.follow(peer, &stream),
            None => tracing::debug!("{peer} can't be connected to; the link to it is not watched"),
        }
    }

    fn greet(&self, peer: Rank) -> Option<TcpStream> {
        let card = &self.cards[peer.index()];
        let Listens { addresses, port, secret } = card.listens.as_ref()?;
        // What is on this host is reached whatever its network does.
        let is_here = card.first_on_host == self.cards[self.rank.index()].first_on_host;
        let near = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()].into_iter().filter(|_| is_here);
        let mut greeting = secret.to_le_bytes().to_vec();
        greeting.extend(self.rank.0.to_le_bytes());
        near.chain(addresses.iter().copied()).find_map(|address| {
            let mut stream = TcpStream::connect_timeout(&SocketAddr::new(address, *port), CONNECT_LIMIT).ok()?;
            stream.write_all(&greeting).ok()?;
            // A stranger with the same address, as bridges of containers have, would not be told from a rank by connecting.
            stream.set_read_timeout(Some(CONNECT_LIMIT)).ok()?;
            let mut echo = [0; 8];
            stream.read_exact(&mut echo).ok()?;
            (u64::from_le_bytes(echo) == !*secret).then_some(stream)
        })
    }

    /// Stays with a connection until it ends, and with it the job if it should.
    fn follow(&self, peer: Rank, stream: &TcpStream) {
        match self.attend(peer, stream) {
            End::Told if ending::fall_silent() => {
                self.tell_but(peer);
                thread::sleep(TOLD_WAITS);
            }
            End::Silent => {
                if peer < self.rank {
                    thread::sleep(TURN);
                }
                ending::last_words(&self.cause(peer));
                self.tell_but(peer);
            }
            End::Told | End::Closed => return,
        }
        ending::abort_job(Exit::PeerFailed);
    }

    fn attend(&self, peer: Rank, mut stream: &TcpStream) -> End {
        match watch(stream).and_then(|()| stream.try_clone()) {
            Ok(kept) => self.peers.lock().unwrap_or_else(PoisonError::into_inner).push((peer, kept)),
            Err(_) => return End::Closed,
        }
        end_of(stream.read_exact(&mut [0]))
    }

    /// Tells all but `peer`, from whom this rank knows it, or whom it does not reach.
    fn tell_but(&self, peer: Rank) {
        for (other, stream) in &mut *self.peers.lock().unwrap_or_else(PoisonError::into_inner) {
            if *other != peer {
                // One byte always fits; who has gone need not hear it.
                let _ = stream.write_all(&[ENDS]);
            }
        }
    }

    fn cause(&self, peer: Rank) -> String {
        let [mine, gone] = [self.rank, peer].map(|rank| &self.cards[rank.index()]);
        let ranks: Vec<Rank> = (0..self.cards.len())
            .filter(|rank| self.cards[*rank].first_on_host == gone.first_on_host)
            .map(Rank::from_index)
            .collect();
        format!(
            "host {} ({}) has not answered host {} ({}) for {} s: the link between them is cut, or the host is down",
            gone.host,
            Ranks(&ranks),
            mine.host,
            self.rank,
            SILENCE.as_secs()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks by their hosts' lowest; rank 0 listens.
    fn cards(firsts: &[u32], listener: &TcpListener) -> Vec<Card> {
        let port = listener.local_addr().unwrap().port();
        let card = |(rank, first): (usize, &u32)| Card {
            first_on_host: *first,
            host: format!("node{first}"),
            listens: (rank == 0).then(|| Listens { addresses: host::addresses(), port, secret: 7 }),
        };
        firsts.iter().enumerate().map(card).collect()
    }

    fn links(rank: u32, cards: Vec<Card>) -> Links {
        Links { rank: Rank(rank), cards, peers: Mutex::default() }
    }

    #[test]
    fn ranks_connect_on_their_host_and_hosts_in_a_line() {
        let cards = cards(&[0, 0, 2, 0, 2, 5], &listen().unwrap());
        let peers: Vec<Option<u32>> = (0..6).map(|rank| connects_to(&cards, Rank(rank)).map(|peer| peer.0)).collect();
        assert_eq!(peers, [None, Some(0), Some(0), Some(0), Some(2), Some(2)]);
    }

    #[test]
    fn silence_is_no_end_of_a_process() {
        for (kind, end) in [
            (ErrorKind::TimedOut, End::Silent),
            (ErrorKind::HostUnreachable, End::Silent),
            (ErrorKind::UnexpectedEof, End::Closed),
            (ErrorKind::ConnectionReset, End::Closed),
        ] {
            assert_eq!(end_of(Err(kind.into())), end, "{kind}");
        }
        assert_eq!(end_of(Ok(())), End::Told);
    }

    #[test]
    fn ranks_know_each_other_and_no_stranger() {
        let listener = listen().unwrap();
        let cards = cards(&[0, 0, 2], &listener);
        let first = links(0, cards.clone());
        thread::scope(|scope| {
            let accepted = scope.spawn(|| {
                let (stream, _) = listener.accept().unwrap();
                let peer = first.greeted_by(&stream);
                (peer, peer.map(|peer| first.attend(peer, &stream)))
            });
            let second = links(1, cards.clone());
            let stream = second.greet(Rank(0)).expect("rank 0 listens");
            // One that leaves without a word is no reason to end.
            drop(stream);
            assert_eq!(accepted.join().unwrap(), (Some(Rank(1)), Some(End::Closed)));
        });
        thread::scope(|scope| {
            scope.spawn(|| assert_eq!(first.greeted_by(&listener.accept().unwrap().0), None));
            let mut strange = cards.clone();
            strange[0].listens.as_mut().unwrap().secret = 8;
            strange[0].listens.as_mut().unwrap().addresses.clear();
            assert!(links(1, strange).greet(Rank(0)).is_none(), "with another job's secret");
        });
    }

    #[test]
    fn all_but_the_one_that_said_it_are_told() {
        let listener = listen().unwrap();
        let cards = cards(&[0, 0, 2], &listener);
        let first = links(0, cards.clone());
        let [told, other] = thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..2 {
                    let (stream, _) = listener.accept().unwrap();
                    let peer = first.greeted_by(&stream).unwrap();
                    first.peers.lock().unwrap().push((peer, stream));
                }
            });
            [1, 2].map(|rank| links(rank, cards.clone()).greet(Rank(0)).expect("rank 0 listens"))
        });
        first.tell_but(Rank(2));
        drop(first);
        let ends = [told, other].map(|stream| links(1, cards.clone()).attend(Rank(0), &stream));
        assert_eq!(ends, [End::Told, End::Closed]);
    }

    #[test]
    fn the_cause_names_hosts_and_ranks() {
        let links = links(0, cards(&[0, 0, 2, 2], &listen().unwrap()));
        insta::assert_snapshot!(
            links.cause(Rank(2)),
            @"host node2 (ranks 2-3) has not answered host node0 (rank 0) for 25 s: the link between them is cut, or the host is down"
        );
    }
}
