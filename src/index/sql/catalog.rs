//! The catalog queries in SQL. Each is one call.

use async_trait::async_trait;
use sqlx::Row;

use super::statement::Statement;
use super::{SqlIndex, message_page, search, stats};
use crate::error::Result;
use crate::index::{
    Catalog, MessageFilter, MessagePage, SearchFilter, SearchResults, StatsFilter, StatsRow,
};
use crate::model::LogId;

#[async_trait]
impl Catalog for SqlIndex {
    async fn messages(&self, log: &LogId, filter: &MessageFilter) -> Result<MessagePage> {
        let cursor = filter
            .cursor
            .as_deref()
            .map(message_page::Cursor::parse)
            .transpose()?;
        self.call(async {
            let mut connection = self.acquire().await?;
            message_page::page(&mut connection, log, filter, cursor).await
        })
        .await
    }

    async fn search(&self, filter: &SearchFilter) -> Result<SearchResults> {
        self.call(async {
            let mut connection = self.acquire().await?;
            search::search(&mut connection, filter).await
        })
        .await
    }

    async fn stats(&self, filter: &StatsFilter) -> Result<Vec<StatsRow>> {
        self.call(async {
            let mut connection = self.acquire().await?;
            stats::stats(&mut connection, filter).await
        })
        .await
    }
}

impl SqlIndex {
    /// Returns the query plan for a page of messages. Tests check that no page needs a scan.
    #[cfg_attr(not(debug_assertions), expect(dead_code, reason = "only tests use it"))]
    pub async fn explain_messages(
        &self,
        log: &LogId,
        filter: &MessageFilter,
    ) -> Result<Vec<String>> {
        let cursor = filter
            .cursor
            .as_deref()
            .map(message_page::Cursor::parse)
            .transpose()?;
        self.call(async {
            let mut connection = self.acquire().await?;
            let (explain, column) = self.target.explain();
            let mut statement = Statement::new(explain);
            message_page::query(&mut statement, log, filter, cursor)?;
            let plan = statement.fetch(&mut connection).await?;
            plan.iter().map(|row| Ok(row.try_get(column)?)).collect()
        })
        .await
    }
}
