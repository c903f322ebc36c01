//! The limit on lost races, for operations that read a log and then write to it.

use crate::error::{Error, Result};
use crate::model::LogId;

/// Maximum number of lost races of one operation. For each lost race, another writer succeeded.
const MAX_LOST_RACES: u32 = 20;

/// Counts the lost races of one operation. The operation is a loop: read, then write. After a
/// conflict, it counts the lost race here and starts again with the entries of the winner.
#[derive(Debug, Default)]
pub struct LostRaces(u32);

impl LostRaces {
    /// Counts a lost race; an error if there were too many.
    pub fn count(&mut self, id: &LogId) -> Result<()> {
        self.0 += 1;
        if self.0 < MAX_LOST_RACES {
            return Ok(());
        }
        Err(
            Error::unavailable(format!("another writer keeps changing {id}"))
                .hint("stop the other writer, then run the command again"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_limited_number_of_races_may_be_lost() {
        let id = LogId {
            namespace: "n".parse().unwrap(),
            agent: "a".parse().unwrap(),
            name: "s".parse().unwrap(),
        };
        let mut races = LostRaces::default();
        for _ in 1..MAX_LOST_RACES {
            races.count(&id).unwrap();
        }
        assert_eq!(races.count(&id).unwrap_err().kind(), ErrorKind::Unavailable);
    }
}
